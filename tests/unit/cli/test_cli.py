"""The command line: what it offers, and what it says when something is wrong."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

import tandem
from tandem.cli import app

RUN = CliRunner()
COMMANDS = ("up", "generate", "demo", "doctor", "pull", "gateway", "prefill", "decode")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A command sets up its process's logs, and this process goes on."""
    ours, root = logging.getLogger("tandem"), logging.getLogger()
    before = (root.handlers[:], root.level, ours.level)
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])


def failed(*arguments: str) -> str:
    """The command fails with one message, and no traceback."""
    result = RUN.invoke(app, list(arguments))
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("error: ")
    return " ".join(result.stderr.split())


def test_the_version_is_the_packages() -> None:
    assert RUN.invoke(app, ["--version"]).stdout == f"tandem {tandem.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    result = RUN.invoke(app, [command, "-h"])
    assert result.exit_code == 0
    assert "Usage:" in result.stdout
    assert command in RUN.invoke(app, ["--help"]).stdout


def test_help_loads_nothing_heavy() -> None:
    script = (
        "import sys; from typer.testing import CliRunner; from tandem.cli import app\n"
        "assert CliRunner().invoke(app, ['generate', '--help']).exit_code == 0\n"
        "print(sorted({'torch', 'ray', 'transformers', 'grpc', 'ucxx', 'redis'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_model_names_what_may_be_given() -> None:
    assert "smollm2-135m" in failed("pull", "no-such-model")


def test_a_folder_is_its_own_answer(tmp_path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    result = RUN.invoke(app, ["pull", str(tmp_path)])
    assert result.stdout.strip() == str(tmp_path)


def test_generate_without_a_cluster_says_how_to_start_one() -> None:
    message = failed("generate", "--address", "127.0.0.1:9", "hello")
    assert "127.0.0.1:9" in message
    assert "tandem up" in message


def test_an_empty_prompt_is_named() -> None:
    assert "prompt" in failed("generate", "")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set", "nonsense"], "SECTION.NAME=VALUE"),
        (["--set", "engine.num_block=5"], "did you mean 'num_blocks'"),
        (["--set", "engine.num_blocks=-5"], "engine.num_blocks"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml"),
        (["--model", "[/]no-such-model"], "[/]no-such-model"),
    ],
)
def test_wrong_settings_are_named(arguments: list[str], says: str) -> None:
    assert says in failed("up", *arguments)


@pytest.mark.parametrize("role", ["gateway", "prefill", "decode"])
def test_a_single_role_needs_the_redis_that_all_share(role: str) -> None:
    assert "--redis-url" in failed(role)


def test_the_doctor_speaks_to_programs_too() -> None:
    result = RUN.invoke(app, ["doctor", "--json"])
    findings = {finding["name"]: finding for finding in json.loads(result.stdout)}
    assert findings["python"]["verdict"] == "ok"
    assert findings["ucx"]["verdict"] == "ok", findings["ucx"]
    assert findings["redis"]["verdict"] == "ok", findings["redis"]
    bad = [finding for finding in findings.values() if finding["verdict"] == "fail"]
    assert result.exit_code == (1 if bad else 0)
    assert all(finding["cure"] for finding in findings.values() if finding["verdict"] != "ok")


def test_the_doctor_names_the_cure_for_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    result = RUN.invoke(app, ["doctor", "--json"])
    (libraries,) = [f for f in json.loads(result.stdout) if f["name"] == "libraries"]
    assert result.exit_code == 1
    assert "uvloop" in libraries["detail"]
    assert "pip install" in libraries["cure"]
