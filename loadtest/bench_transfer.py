"""KV blocks between two processes over UCX, beside memcpy of the same bytes within one."""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection

import numpy as np
from rich.console import Console
from rich.table import Table

from tandem.clock import Deadline
from tandem.system import SystemClock
from tandem.transport.ucx import UcxTransport

BLOCK_BYTES = 737_280
"""One block of SmolLM2-135M in float32: 30 layers, keys and values, 16 tokens, 3 heads of 64."""
SIZES = (65_536, BLOCK_BYTES, 4 << 20)
TOTAL_BYTES = 64 << 20
ROUNDS = 7


async def _receive(pipe: Connection) -> None:
    """Land each round's messages in a buffer, and say so."""
    memory = np.zeros(TOTAL_BYTES, dtype=np.uint8).data
    async with UcxTransport() as transport:
        pipe.send(transport.address)
        for size in SIZES:
            for _ in range(ROUNDS):
                receives = [
                    transport.post_receive(tag, memory[tag * size : (tag + 1) * size])
                    for tag in range(TOTAL_BYTES // size)
                ]
                pipe.send("posted")
                await asyncio.gather(*(receive.wait() for receive in receives))
                pipe.send("landed")
        await asyncio.to_thread(pipe.recv)


def _receiver(pipe: Connection) -> None:
    asyncio.run(_receive(pipe))


async def _measure(pipe: Connection, console: Console) -> None:
    source = np.random.default_rng(0).integers(0, 256, TOTAL_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    table = Table("message", "UCX GB/s", "memcpy GB/s", "ratio", title="KV transfer, medians")
    async with UcxTransport() as transport:
        address = await asyncio.to_thread(pipe.recv)
        endpoint = await transport.connect(address, Deadline.after(SystemClock(), 10.0))
        for size in SIZES:
            count = TOTAL_BYTES // size
            over_ucx, copied = [], []
            for _ in range(ROUNDS):
                await asyncio.to_thread(pipe.recv)
                start_s = time.perf_counter()
                await asyncio.gather(
                    *(endpoint.send(tag, source.data[tag * size : (tag + 1) * size]) for tag in range(count))
                )
                await asyncio.to_thread(pipe.recv)
                over_ucx.append(count * size / (time.perf_counter() - start_s) / 1e9)
                start_s = time.perf_counter()
                for tag in range(count):
                    target[tag * size : (tag + 1) * size] = source[tag * size : (tag + 1) * size]
                copied.append(count * size / (time.perf_counter() - start_s) / 1e9)
            ucx, memcpy = statistics.median(over_ucx), statistics.median(copied)
            table.add_row(f"{size:,} B", f"{ucx:.2f}", f"{memcpy:.2f}", f"{ucx / memcpy:.2f}")
    console.print(table)
    pipe.send("done")


def run(console: Console) -> None:
    """Measure UCX and memcpy in turns, and print both."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    receiver = context.Process(target=_receiver, args=(theirs,), daemon=True)
    receiver.start()
    asyncio.run(_measure(ours, console))
    receiver.join(10)


if __name__ == "__main__":
    run(Console())
