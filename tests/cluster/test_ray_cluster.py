"""A whole cluster on a Ray of its own: up, killed, up again, and down without a trace."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from typing import Any

import psutil
import pytest
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.reference import greedy, random_prompt

from tandem.cluster.launcher import Cluster, open_cluster
from tandem.config.settings import Settings
from tandem.errors import ConfigError, TandemError
from tandem.generation import CallContext, Phase
from tandem.request import Request, SamplingParams
from tandem.rpc.channels import ChannelPool
from tandem.rpc.clients import GrpcInference
from tandem.system import SystemClock

pytestmark = pytest.mark.timeout(180)
CLOCK = SystemClock()


def settings_for(**sections: dict[str, Any]) -> Settings:
    merged = {
        "model": {"ref": str(tiny_model()), "served_name": "tiny"},
        "engine": {"num_blocks": 200, "max_batch_tokens": 128},
        "gateway": {"port": 0, "disaggregation": "always"},
        "telemetry": {"log_level": "WARNING"},
    }
    return Settings(**{k: merged.get(k, {}) | sections.get(k, {}) for k in merged | sections})


async def ask(cluster: Cluster, seed: int) -> list[str]:
    """The right answer comes; returns the workers that computed it."""
    prompt = random_prompt(50, VOCAB_SIZE, seed)
    request = Request(token_ids=prompt, sampling=SamplingParams(temperature=0.0, max_tokens=8))
    tokens: list[int] = []
    async with ChannelPool() as pool:
        async for chunk in GrpcInference(pool, cluster.address, CLOCK).generate(request, CallContext()):
            tokens += [token.token_id for token in chunk.tokens]
    assert tuple(tokens) == greedy(tiny_model(), prompt, 8)
    computed = (Phase.PREFILL, Phase.DECODE)
    return [str(timing.attributes["worker"]) for timing in chunk.phases if timing.phase in computed]


def epoch_of(cluster: Cluster, worker_id: str) -> int:
    """Which life of the worker the gateway knows; 0 for none."""
    records = cluster.gateway.directory.workers()
    return next((record.epoch for record in records if record.worker_id == worker_id), 0)


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


async def gone(pids: set[int]) -> None:
    """Return once none of them runs; fail after a while."""
    async with asyncio.timeout(20):
        while alive := {pid for pid in pids if _runs(pid)}:  # noqa: ASYNC110 (not our children any more)
            await asyncio.sleep(0.1)
    assert not alive


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_p7_up_answers_killed_up_again_and_down() -> None:
    before = children()
    async with open_cluster(settings_for()) as cluster:
        assert await ask(cluster, seed=1) == ["prefill-0", "decode-0"]
        pids = await cluster.pids()
        assert len(set(pids.values())) == 3
        started = children() - before
        for worker in ("decode-0", "prefill-0"):
            epoch = epoch_of(cluster, worker)
            os.kill(pids[worker], signal.SIGKILL)
            await cluster.gateway.directory.wait_until(
                lambda w=worker, e=epoch: epoch_of(cluster, w) > e, 60.0
            )
            assert await ask(cluster, seed=epoch % 1000) == ["prefill-0", "decode-0"]
        started |= children() - before
    await gone(started)


async def test_a_start_that_fails_says_why_and_leaves_nothing() -> None:
    before = children()
    with pytest.raises(ConfigError, match="no free memory for the KV pool"):
        async with open_cluster(settings_for(engine={"num_blocks": 1 << 30})):
            pass
    await gone(children() - before)


async def test_a_port_in_use_is_told_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}"):
            async with open_cluster(settings_for(gateway={"port": port}), report=pytest.fail):
                pass


async def test_an_embedded_redis_is_not_for_a_ray_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    with pytest.raises(TandemError, match="redis_url"):
        async with open_cluster(settings_for()):
            pass


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_tandem_up_ends_on_a_signal_with_nothing_left(number: signal.Signals, status: int) -> None:
    command = [sys.executable, "-m", "tandem.cli", "up", "--model", str(tiny_model()), "--port", "0"]
    process = await asyncio.create_subprocess_exec(
        *command, stderr=subprocess.PIPE, start_new_session=True, env=os.environ | {"COLUMNS": "200"}
    )
    assert process.stderr is not None
    seen = b""
    async with asyncio.timeout(90):
        while b"ready" not in seen:
            line = await process.stderr.readline()
            assert line, seen.decode()
            seen += line
    started = {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
    assert len(started) > 3
    process.send_signal(number)
    async with asyncio.timeout(60):
        rest = await process.stderr.read()
        assert await process.wait() == status, rest.decode()
    assert b"stopped" in rest
    assert b"Traceback" not in rest
    await gone(started)
