"""The committed generated code is what the .proto files say, and those keep buf's STANDARD rules."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("tandem/v1", "tandem/internal")


def generated(root: Path) -> dict[str, bytes]:
    """All files of the generated packages under a source root, without caches."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for package in PACKAGES
        for path in sorted((root / package).rglob("*.py*"))
        if path.suffix in (".py", ".pyi")
    }


def test_committed_code_is_fresh(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "protos" / "generate.py", "--out", tmp_path], check=True)
    fresh, committed = generated(tmp_path), generated(ROOT / "services")
    assert fresh.keys() == committed.keys(), "run `python protos/generate.py` and commit"
    stale = [name for name, content in fresh.items() if committed[name] != content]
    assert not stale, "run `python protos/generate.py` and commit"
    assert "tandem/v1/inference_service_pb2_grpc.pyi" in fresh


def test_protos_keep_the_standard_rules(tmp_path: Path) -> None:
    buf = shutil.which("buf", path=str(Path(sys.executable).parent))
    assert buf, "buf is missing: pip install -e '.[dev]'"
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [buf, "lint"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
