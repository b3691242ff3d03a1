"""What the hand-off costs: time to first token on a prefill worker, beside the decode worker's own."""

from __future__ import annotations

import asyncio
import random
import statistics
from contextlib import aclosing

from rich.console import Console
from rich.table import Table

from tandem.cluster.launcher import open_cluster
from tandem.config.load import load_settings
from tandem.config.settings import Settings
from tandem.gateway.node import open_gateway
from tandem.generation import CallContext
from tandem.model.pull import ensure_model
from tandem.request import Request, SamplingParams
from tandem.rpc.channels import ChannelPool
from tandem.rpc.clients import GrpcInference
from tandem.system import SystemClock, SystemIds

PROMPT_TOKENS = (64, 256, 512, 1024)
ROUNDS = 5
VOCAB_SIZE = 49_152
NUM_TOKENS = 4


def _settings(mode: str) -> Settings:
    return load_settings(
        overrides={
            "model": {"ref": str(ensure_model("smollm2-135m"))},
            "gateway": {"port": 0, "disaggregation": mode},
            "telemetry": {"log_level": "WARNING"},
        }
    )


async def _ttft_s(service: GrpcInference, num_tokens: int, clock: SystemClock) -> float:
    """Seconds to the first token of a prompt that nobody has seen."""
    prompt = tuple(random.randrange(10, VOCAB_SIZE) for _ in range(num_tokens))
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    start_s = clock.monotonic_s()
    first_s: float | None = None
    async with aclosing(
        service.generate(Request(token_ids=prompt, sampling=sampling), CallContext())
    ) as chunks:
        async for chunk in chunks:
            if chunk.tokens and first_s is None:
                first_s = clock.monotonic_s()
    assert first_s is not None
    return first_s - start_s


async def _measure(console: Console) -> None:
    clock, ids = SystemClock(), SystemIds()
    table = Table("prompt", "local", "disaggregated", "difference", "aim: 10 ms + 3 %", title="TTFT, medians")
    async with (
        open_cluster(_settings("always")) as cluster,
        open_gateway(_settings("never"), redis_url=cluster.redis_url, clock=clock, ids=ids) as other,
        ChannelPool() as pool,
    ):
        await other.directory.wait_until(lambda: len(other.directory.workers()) == 2, 10.0)
        remote = GrpcInference(pool, cluster.address, clock)
        local = GrpcInference(pool, other.address, clock)
        for num_tokens in PROMPT_TOKENS:
            seen: dict[GrpcInference, list[float]] = {local: [], remote: []}
            for turn in range(ROUNDS + 1):
                for service, times in seen.items():
                    ttft_s = await _ttft_s(service, num_tokens, clock)
                    if turn:  # the first one warms up
                        times.append(ttft_s)
            here, there = statistics.median(seen[local]), statistics.median(seen[remote])
            table.add_row(
                f"{num_tokens} tokens",
                f"{here * 1e3:.0f} ms",
                f"{there * 1e3:.0f} ms",
                f"{(there - here) * 1e3:+.1f} ms",
                f"{10 + 0.03 * here * 1e3:.1f} ms",
            )
    console.print(table)


def run(console: Console) -> None:
    """Measure both ways in turns on one cluster of two workers, and print the difference."""
    asyncio.run(_measure(console))


if __name__ == "__main__":
    run(Console())
