"""P20 and P39: Redis frozen, slow to come, killed. Calls fail at once, reads go on, all heals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from tests.support.directory_fakes import FINGERPRINT, RealClock, blocks, make_record

from tandem.directory.embedded import EmbeddedRedis
from tandem.directory.publisher import PrefixPublisher
from tandem.directory.redis_directory import RedisDirectory
from tandem.errors import ConfigError, TandemError, Unavailable
from tandem.ids import Epoch, WorkerId
from tandem.kv.events import BlocksStored

A = WorkerId("a")
HELD = blocks(1, 2, 3)


@pytest.fixture
async def cluster() -> AsyncIterator[tuple[EmbeddedRedis, RedisDirectory]]:
    """A worker that renews its lease and publishes, and a mirror."""
    with EmbeddedRedis() as server:
        async with RedisDirectory(
            server.url, FINGERPRINT, RealClock(), timeout_s=0.2, block_s=0.1
        ) as directory:
            await directory.start()
            heartbeat = asyncio.create_task(renew_forever(directory))
            publisher = PrefixPublisher(
                directory.index, A, Epoch(1), lambda: HELD, check_s=0.05, max_delay_s=0.05
            )
            await publisher.start()
            publisher.offer([BlocksStored(HELD)])
            await directory.wait_until(lambda: directory.index.match(HELD) == {A: 3}, 5.0)
            yield server, directory
            await publisher.aclose()
            heartbeat.cancel()
            await asyncio.gather(heartbeat, return_exceptions=True)


async def renew_forever(directory: RedisDirectory) -> None:
    while True:
        with contextlib.suppress(TandemError):
            await directory.membership.announce(make_record("a"), ttl_s=2.0)
        await asyncio.sleep(0.05)


async def fails_fast(call: Callable[[], Awaitable[object]]) -> None:
    start_s = time.monotonic()
    with pytest.raises(Unavailable, match="Redis at unix://"):
        await call()
    assert time.monotonic() - start_s < 1.0


async def test_p20_a_frozen_redis_fails_calls_fast_serves_the_mirror_and_heals(
    cluster: tuple[EmbeddedRedis, RedisDirectory],
) -> None:
    server, directory = cluster
    os.kill(server.pid, signal.SIGSTOP)
    try:
        await fails_fast(lambda: directory.index.publish(A, Epoch(1), 99, []))
        await fails_fast(lambda: directory.membership.announce(make_record("b"), 10.0))
        await fails_fast(lambda: directory.membership.leave(A, Epoch(1)))
        await fails_fast(directory.ping)
        await directory.wait_until(lambda: not directory.in_contact, 5.0)
        await asyncio.sleep(2.5)  # longer than the lease: time itself is under test
        assert [record.worker_id for record in directory.workers()] == [A]
        start_s = time.monotonic()
        assert directory.index.match(HELD) == {A: 3}
        assert time.monotonic() - start_s < 0.05
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await directory.wait_until(lambda: directory.in_contact, 5.0)
    await directory.membership.announce(make_record("b"), 10.0)
    await directory.wait_until(lambda: len(directory.workers()) == 2, 5.0)
    await directory.wait_until(lambda: directory.index.match(HELD) == {A: 3}, 5.0)


async def test_p20_a_killed_redis_comes_back_empty_and_is_filled_again(
    cluster: tuple[EmbeddedRedis, RedisDirectory],
) -> None:
    server, directory = cluster
    os.kill(server.pid, signal.SIGKILL)
    await fails_fast(directory.ping)
    await directory.wait_until(lambda: not directory.in_contact, 5.0)
    assert [record.worker_id for record in directory.workers()] == [A]
    assert directory.index.match(HELD) == {A: 3}
    await directory.wait_until(lambda: directory.in_contact, 10.0)
    assert [record.worker_id for record in directory.workers()] == [A]
    await directory.wait_until(lambda: directory.index.match(HELD) == {A: 3}, 5.0)
    assert await directory._store.command("EXISTS", "wrk:a") == 1


async def test_p19_a_flushed_redis_is_noticed_and_filled_again(
    cluster: tuple[EmbeddedRedis, RedisDirectory],
) -> None:
    _, directory = cluster
    await directory.membership.announce(make_record("b"), ttl_s=60.0)
    await directory.index.publish(WorkerId("b"), Epoch(1), 1, [BlocksStored(blocks(9))])
    await directory.wait_until(lambda: directory.index.match(blocks(9)) != {}, 5.0)
    await directory._store.command("FLUSHALL")
    await directory.wait_until(lambda: [record.worker_id for record in directory.workers()] == [A], 5.0)
    await directory.wait_until(lambda: directory.index.num_blocks == len(HELD), 5.0)
    await directory.wait_until(lambda: directory.index.match(HELD) == {A: 3}, 5.0)


async def test_a_redis_that_was_never_there_fails_fast_and_closes_cleanly() -> None:
    async with RedisDirectory("unix:///nonexistent/redis.sock", FINGERPRINT, RealClock()) as directory:
        await directory.start()
        await fails_fast(directory.ping)
        assert directory.workers() == ()
        assert directory.index.match(HELD) == {}


@pytest.mark.parametrize("url", ["localhost:6379", "http://:secret@h/"])
async def test_a_wrong_url_is_said_without_the_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"directory\.redis_url") as caught:
        RedisDirectory(url, FINGERPRINT, RealClock())
    assert "secret" not in str(caught.value)


async def test_a_wrong_password_is_a_setting_to_cure() -> None:
    with EmbeddedRedis() as server:
        async with RedisDirectory(server.url, FINGERPRINT, RealClock()) as open_door:
            await open_door._store.command("CONFIG", "SET", "requirepass", "right")
        async with RedisDirectory(
            server.url.replace("unix://", "unix://:wrong@"), FINGERPRINT, RealClock()
        ) as directory:
            with pytest.raises(ConfigError, match="password") as caught:
                await directory.ping()
            assert "wrong@" not in str(caught.value)
        async with RedisDirectory(server.url, FINGERPRINT, RealClock()) as directory:
            with pytest.raises(ConfigError, match="password"):
                await directory.ping()


@pytest.mark.parametrize("namespace", ["", "a|b", "a:b"])
async def test_a_namespace_that_would_mix_up_keys_is_refused(namespace: str) -> None:
    with pytest.raises(ConfigError, match="namespace"):
        RedisDirectory("unix:///x", namespace, RealClock())
