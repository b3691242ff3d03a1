"""What directory and routing tests share: a clock set by hand, records and hashes by number."""

from __future__ import annotations

import time

from tandem.directory.base import Role, WorkerLoad, WorkerRecord, WorkerState
from tandem.ids import BlockHash, Epoch, WorkerId
from tandem.kv.ticket import PeerAddress

FINGERPRINT = "0123456789abcdef"


class ManualClock:
    """Time moves only when told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_ns(self) -> int:
        return int(self.now_s * 1e9)


class RealClock:
    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_ns(self) -> int:
        return time.time_ns()


def make_record(
    name: str = "decode-0",
    *,
    epoch: int = 1,
    role: Role = Role.DECODE,
    state: WorkerState = WorkerState.READY,
    fingerprint: str = FINGERPRINT,
    num_blocks: int = 1000,
    free_blocks: int | None = None,
    running: int = 0,
    waiting: int = 0,
    queued_tokens: int = 0,
    max_context_tokens: int = 8192,
) -> WorkerRecord:
    return WorkerRecord(
        address=PeerAddress(WorkerId(name), Epoch(epoch), "127.0.0.1:7000", b"\x00\xffucx"),
        role=role,
        state=state,
        model_id="tiny",
        layout_fingerprint=fingerprint,
        block_size_tokens=16,
        num_blocks=num_blocks,
        max_context_tokens=max_context_tokens,
        load=WorkerLoad(
            num_free_blocks=num_blocks if free_blocks is None else free_blocks,
            num_running=running,
            num_waiting=waiting,
            queued_prefill_tokens=queued_tokens,
        ),
        capabilities={"transport": "inproc"},
    )


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


def blocks(*numbers: int) -> tuple[BlockHash, ...]:
    return tuple(map(block, numbers))
