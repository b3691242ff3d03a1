"""Clusters in one process for tests: settings, answers in tokens, and the proof that nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.cluster.local import LocalCluster, open_local_cluster
from tandem.config.settings import Settings
from tandem.generation import CallContext, Phase, PhaseTiming
from tandem.request import FinishReason, Request, SamplingParams, Usage


def local_settings(folder: Path, mode: str = "always", **sections: dict[str, Any]) -> Settings:
    """Small engines; `mode` is the gateway's disaggregation."""
    engine = {"num_blocks": 400, "max_batch_tokens": 128, "max_num_sequences": 16} | sections.pop(
        "engine", {}
    )
    gateway = {"disaggregation": mode} | sections.pop("gateway", {})
    return Settings(model={"ref": str(folder)}, engine=engine, gateway=gateway, **sections)


@asynccontextmanager
async def local_cluster(settings: Settings, **rest: Any) -> AsyncIterator[LocalCluster]:
    """An `open_local_cluster` that must be idle at its end."""
    async with open_local_cluster(settings, **rest) as cluster:
        yield cluster
        await wait_idle(cluster)


@dataclass(frozen=True)
class Answer:
    """All of one choice."""

    tokens: tuple[int, ...]
    text: str
    finish: FinishReason
    usage: Usage
    phases: tuple[PhaseTiming, ...]

    def workers(self, phase: Phase) -> list[str]:
        """Where this phase ran."""
        return [str(timing.attributes["worker"]) for timing in self.phases if timing.phase is phase]


async def ask(
    cluster: LocalCluster, prompt: Sequence[int], *, tenant: str = "", public: bool = False, **sampling: Any
) -> Answer:
    """Greedy unless `sampling` says otherwise."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8} | sampling)
    request = Request(token_ids=tuple(prompt), sampling=params, tenant=tenant, public_prefix=public)
    tokens: list[int] = []
    text = ""
    async with aclosing(cluster.gateway.generate(request, CallContext())) as chunks:
        async for chunk in chunks:
            tokens.extend(token.token_id for token in chunk.tokens)
            text += chunk.text
    assert chunk.finish is not None
    assert chunk.usage is not None
    return Answer(tuple(tokens), text, chunk.finish, chunk.usage, chunk.phases)


def assert_remote(answer: Answer) -> None:
    """P38: the prompt was computed on a prefill worker and its blocks crossed to a decode worker."""
    (prefill,) = answer.workers(Phase.PREFILL)
    assert prefill.startswith("prefill")
    (decode,) = answer.workers(Phase.DECODE)
    assert decode.startswith("decode")
    assert len([t for t in answer.phases if t.phase is Phase.TRANSFER]) == 1


async def wait_idle(cluster: LocalCluster, timeout_s: float = 10.0) -> None:
    """Return once nothing is held anywhere and every block is free; fail after `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            while not _is_idle(cluster):  # noqa: ASYNC110 (it ends in several threads: no event covers it)
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"still held: {_held(cluster)}") from None


def _held(cluster: LocalCluster) -> dict[str, Any]:
    held: dict[str, Any] = {
        name: (worker.num_open, worker.loop.load()) for name, worker in cluster.workers.items()
    }
    return held | {
        "bookings": cluster.router.book.num_open,
        "inboxes": cluster.links.num_listening,
        "requests": cluster.gateway.admission.num_open,
    }


def _is_idle(cluster: LocalCluster) -> bool:
    return (
        cluster.router.book.num_open == 0
        and cluster.links.num_listening == 0
        and cluster.gateway.admission.num_open == 0
        and all(
            worker.num_open == 0
            and worker.loop.load().num_free_blocks == worker.record().num_blocks
            and worker.loop.load().num_running == 0
            for worker in cluster.workers.values()
        )
    )
