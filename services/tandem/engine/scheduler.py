"""Who gets tokens in the next step, and who holds blocks. Pure: no model, no clock, no thread.

Continuous batching (Orca, Yu et al., 2022) with chunked prefill (Sarathi-Serve, Agrawal et al.,
2024): decoding sequences first, one token each, then prompts in chunks up to the token budget. When
blocks run out, the last in order is preempted: it gives up its blocks and computes them again later.
"""

from __future__ import annotations

from array import array
from bisect import insort
from dataclasses import dataclass, field

from tandem.engine.sequence import Purpose, Sequence, Stage
from tandem.engine.settings import EngineSettings
from tandem.errors import OutOfBlocks, Overloaded
from tandem.kv.pool import BlockPool


@dataclass(slots=True)
class Plan:
    """One step. `chunks` are (sequence, number of its next tokens to compute)."""

    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    started: list[Sequence] = field(default_factory=list)
    """Got blocks and run from now on, also again after a preemption."""
    reserved: list[Sequence] = field(default_factory=list)
    """Got the blocks that they wait to have filled."""


class Scheduler:
    """Owns the queue, the running set, and every sequence's hold on blocks."""

    def __init__(self, pool: BlockPool, settings: EngineSettings) -> None:
        self.pool = pool
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_reserved = 0
        self.retry_after_s = 1.0
        """What a refused caller is told; the engine keeps it near the latest waits in the queue."""
        self._settings = settings

    def add(self, sequence: Sequence) -> None:
        """Queue a new one. Raises `OutOfBlocks` if it can never fit, `Overloaded` if the queue is full."""
        wanted = self.pool.num_blocks_for(sequence.num_tokens)
        if wanted > self.pool.num_blocks:
            raise OutOfBlocks(wanted=wanted, free=self.pool.num_free, retry_after_s=self.retry_after_s)
        if len(self.waiting) >= self._settings.max_waiting:
            if sequence.purpose is Purpose.RECEIVE:
                raise OutOfBlocks(wanted=wanted, free=self.pool.num_free, retry_after_s=self.retry_after_s)
            raise Overloaded(
                f"{len(self.waiting)} sequences are waiting, as many as may; "
                "retry later, or raise engine.max_waiting",
                retry_after_s=self.retry_after_s,
            )
        insort(self.waiting, sequence, key=_order)

    def schedule(self) -> Plan:
        """Decide the next step: moves sequences between stages, takes and evicts blocks."""
        plan = Plan()
        for sequence in tuple(self.running):
            decodes = sequence.stage is Stage.RUNNING and sequence.num_pending_tokens == 1
            if decodes and self._grow(sequence):
                plan.chunks.append((sequence, 1))
        budget_tokens = self._settings.max_batch_tokens - len(plan.chunks)
        for sequence in self.running:
            if budget_tokens and sequence.num_pending_tokens > 1:
                budget_tokens -= self._give(sequence, budget_tokens, plan)
        if self.waiting:
            self._start_waiting(plan, budget_tokens)
        return plan

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """Its next `num_tokens` tokens have KV now; blocks that became full become shareable."""
        sequence.num_computed_tokens += num_tokens
        num_full = sequence.num_computed_tokens // self.pool.block_size_tokens
        if num_full > sequence.num_shareable_blocks:
            sequence.last_shareable = self.pool.cache.extend(
                sequence.spec.chain_root,
                sequence.last_shareable,
                sequence.token_ids,
                sequence.block_ids,
                sequence.num_shareable_blocks,
                num_full,
            )
            sequence.num_shareable_blocks = num_full

    def admit(self, sequence: Sequence) -> None:
        """A reserved sequence's blocks are filled: share them and let it run."""
        sequence.stage = Stage.RUNNING
        sequence.purpose = Purpose.GENERATE
        self.num_reserved -= 1
        self.commit(sequence, sequence.num_pending_tokens)
        insort(self.running, sequence, key=_order)

    def hold(self, sequence: Sequence) -> None:
        """Compute no more of a running or reserved sequence, but let it keep its blocks."""
        self._leave_stage(sequence)
        sequence.stage = Stage.HELD

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence in any stage and release its blocks."""
        self._leave_stage(sequence)
        sequence.stage = Stage.ENDED
        self._release_blocks(sequence)

    def _grow(self, sequence: Sequence) -> bool:
        """Make room for its next token's KV, preempting if need be; false if it was preempted itself."""
        lacking = self.pool.num_blocks_for(sequence.num_tokens) - len(sequence.block_ids)
        if lacking <= 0:
            return True
        while (new := self.pool.take(lacking)) is None:
            # The sequence itself qualifies, so there always is one.
            victim = next(s for s in reversed(self.running) if s.purpose is Purpose.GENERATE)
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.block_ids.extend(new)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release_blocks(sequence)
        sequence.num_computed_tokens = 0
        sequence.stage = Stage.WAITING
        insort(self.waiting, sequence, key=_order)

    def _give(self, sequence: Sequence, budget_tokens: int, plan: Plan) -> int:
        num_tokens = min(sequence.num_pending_tokens, budget_tokens)
        plan.chunks.append((sequence, num_tokens))
        return num_tokens

    def _start_waiting(self, plan: Plan, budget_tokens: int) -> None:
        """Start waiting sequences in order. One that lacks blocks holds up all behind it, so that a
        large one isn't overtaken for ever; one that only lacks budget lets reservations pass.
        """
        for sequence in self.waiting:
            receives = sequence.purpose is Purpose.RECEIVE
            if not receives and budget_tokens == 0:
                continue
            if len(self.running) + self.num_reserved >= self._settings.max_num_sequences:
                break
            if not self._take_blocks(sequence):
                break
            if receives:
                sequence.stage = Stage.RESERVED
                self.num_reserved += 1
                plan.reserved.append(sequence)
            else:
                sequence.stage = Stage.RUNNING
                insort(self.running, sequence, key=_order)
                plan.started.append(sequence)
                budget_tokens -= self._give(sequence, budget_tokens, plan)
        if plan.started or plan.reserved:
            self.waiting = [s for s in self.waiting if s.stage is Stage.WAITING]

    def _take_blocks(self, sequence: Sequence) -> bool:
        """Take all blocks that its tokens need, shared ones as far as the cache has them.

        The last token is always computed, since its logits are wanted. A block is left for each
        running sequence, which might need it in the next steps, lest it be preempted at once.
        """
        block_size = self.pool.block_size_tokens
        matched = self.pool.cache.match(
            sequence.spec.chain_root, sequence.token_ids, (sequence.num_tokens - 1) // block_size
        )
        shared = [node.block_id for node in matched if node.block_id is not None]
        num_new = self.pool.num_blocks_for(sequence.num_tokens) - len(shared)
        if self.pool.num_spare(shared) < num_new + len(self.running):
            return False
        new = self.pool.take(num_new, shared)
        if new is None:
            return False
        sequence.block_ids = array("i", [*shared, *new])
        sequence.num_computed_tokens = len(shared) * block_size
        sequence.num_shareable_blocks = len(shared)
        sequence.last_shareable = matched[-1] if matched else None
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.spec.num_prompt_tokens)
        return True

    def _leave_stage(self, sequence: Sequence) -> None:
        if sequence.stage is Stage.WAITING:
            self.waiting.remove(sequence)
        elif sequence.stage is Stage.RUNNING:
            self.running.remove(sequence)
        elif sequence.stage is Stage.RESERVED:
            self.num_reserved -= 1

    def _release_blocks(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_ids)
        sequence.block_ids = array("i")


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
