"""One Redis, reached with deadlines: every failure of it is `Unavailable` within about a second.

Keys, all in one database (one primary; Redis Cluster is not supported):
``wrk:{id}`` hash, lives as long as the lease · ``epo:{id}`` newest epoch, for a day · ``wrks`` known
ids · ``blk:{ns}:{hash}`` hash from worker to ``epoch.generation`` · ``own:{ns}:{id}:{generation}``
set of a worker's blocks · ``pub:{ns}:{id}`` where its publishing stands · ``owners`` what may need a
purge · ``wrk-events``, ``idx-events:{ns}`` streams of changes, each with a counter ``…:n``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from tandem.errors import ConfigError, Unavailable

Argument = bytes | str | int
_REFUSALS = (
    exceptions.AuthenticationError,
    exceptions.AuthorizationError,
    exceptions.NoPermissionError,
)


class RedisStore:
    """A pool for commands and one for blocking reads. Both time-outs are set on both; no retries.

    `timeout_s` bounds connecting and one answer; a call takes at most twice that.
    """

    def __init__(self, url: str, *, timeout_s: float = 0.5, block_s: float = 1.0) -> None:
        self.where = _without_password(url)
        self.timeout_s = timeout_s
        self.block_s = block_s
        # Any, because redis-py leaves execute_command untyped.
        self._client: Any = _connect(url, timeout_s, timeout_s)
        self._blocking: Any = _connect(url, timeout_s, timeout_s + block_s)
        self._scripts: dict[str, Any] = {}

    async def command(self, *arguments: Argument) -> Any:
        """Run one command. Raises `Unavailable`; `ConfigError` when Redis refuses us."""
        with self._mapped():
            async with asyncio.timeout(2 * self.timeout_s):
                return await _heeding_cancel(self._client.execute_command(*arguments))

    async def script(self, lua: str, keys: Sequence[bytes | str], arguments: Sequence[Argument]) -> Any:
        """Run a Lua script, atomically on the server. Raises as `command` does."""
        script = self._scripts.get(lua)
        if script is None:
            script = self._scripts[lua] = self._client.register_script(lua)
        with self._mapped():
            async with asyncio.timeout(2 * self.timeout_s):
                return await _heeding_cancel(script(keys=list(keys), args=list(arguments)))

    async def read_stream(
        self, stream: bytes, after: bytes, count: int
    ) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Entries after id `after`; waits up to `block_s` for the first one, then returns none."""
        with self._mapped():
            async with asyncio.timeout(2 * self.timeout_s + self.block_s):
                reply = await _heeding_cancel(
                    self._blocking.execute_command(
                        "XREAD", "COUNT", count, "BLOCK", int(self.block_s * 1000), "STREAMS", stream, after
                    )
                )
        return list(reply[0][1]) if reply else []

    async def aclose(self) -> None:
        """Close every connection. Idempotent."""
        await self._client.aclose(close_connection_pool=True)
        await self._blocking.aclose(close_connection_pool=True)

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except (exceptions.RedisError, OSError, TimeoutError) as error:
            reason: BaseException = error
            while isinstance(reason.__cause__, exceptions.RedisError):
                reason = reason.__cause__  # redis-py wraps a refused login in a ConnectionError
            if isinstance(reason, _REFUSALS):
                raise ConfigError(
                    f"Redis at {self.where} refuses our user, our password or a command: {reason}; "
                    "set directory.redis_url to redis://user:password@host and see the user's ACL"
                ) from error
            raise Unavailable(
                f"Redis at {self.where} gave no answer ({type(error).__name__}: {error}); check that it "
                "runs and can be reached from here"
            ) from error


async def _heeding_cancel(call: Awaitable[Any]) -> Any:
    """Await `call`; a cancellation that it swallowed is raised after all.

    redis-py sends through `asyncio.wait_for`, which before Python 3.12 drops a cancellation that comes
    together with the result (python/cpython#81839): tasks would outlive their cancellation.
    """
    task = asyncio.current_task()
    assert task is not None
    num_before = task.cancelling()
    try:
        return await call
    finally:
        if task.cancelling() > num_before:
            raise asyncio.CancelledError


def _connect(url: str, connect_timeout_s: float, answer_timeout_s: float) -> Redis:
    try:
        return Redis.from_url(
            url,
            protocol=2,
            socket_connect_timeout=connect_timeout_s,
            socket_timeout=answer_timeout_s,
            retry=Retry(NoBackoff(), 0),
            health_check_interval=0,
        )
    except ValueError as error:
        raise ConfigError(
            f"directory.redis_url is {_without_password(url)!r}; it must look like redis://host:6379/0, "
            "rediss://user:password@host:6379/0 or unix:///path/to/socket"
        ) from error


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"
