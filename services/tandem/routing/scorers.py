"""Prices of a choice, in predicted seconds; lower is better. Pure functions of a snapshot.

A worker's own account lags by a heartbeat and our bookings don't know other routers' work, so each
load is taken as the larger of the two.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.directory.base import WorkerRecord
from tandem.routing.filters import num_blocks_wanted
from tandem.routing.load_book import BookedLoad
from tandem.routing.profiles import Profiles
from tandem.routing.query import RouteQuery

_STEPS_UNTIL_ROOM = 64  # a guess at what a running sequence has left; a real length isn't known


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker as seen for one query. `num_matched_blocks` leading blocks are believed to be there."""

    worker: WorkerRecord
    booked: BookedLoad
    num_matched_blocks: int

    @property
    def queued_prefill_tokens(self) -> int:
        """Tokens that wait to be computed before ours."""
        return max(self.worker.load.queued_prefill_tokens, self.booked.num_prefill_tokens)

    @property
    def num_sequences(self) -> int:
        """Sequences that run or are about to."""
        load = self.worker.load
        return max(load.num_running + load.num_waiting, self.booked.num_sequences)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can still be had; never negative."""
        return max(0, min(self.worker.load.num_free_blocks, self.worker.num_blocks - self.booked.num_blocks))


def num_cached_tokens(query: RouteQuery, candidate: Candidate) -> int:
    """Prompt tokens that need no computing here; the last prompt token always does."""
    block = candidate.worker.block_size_tokens
    blocks = min(candidate.num_matched_blocks, query.num_hashes, (query.num_prompt_tokens - 1) // block)
    return max(0, blocks) * block


def num_uncached_tokens(query: RouteQuery, candidate: Candidate) -> int:
    """Prompt tokens to compute here; at least one."""
    return query.num_prompt_tokens - num_cached_tokens(query, candidate)


def has_room(query: RouteQuery, candidate: Candidate) -> bool:
    """The blocks the worker lacks for this prompt are free now."""
    held = num_cached_tokens(query, candidate) // candidate.worker.block_size_tokens
    return num_blocks_wanted(query, candidate.worker) - held <= candidate.num_free_blocks


def prefill_score_s(query: RouteQuery, candidate: Candidate, profiles: Profiles) -> float:
    """Seconds until this worker has computed the prompt, its queue first."""
    tokens = candidate.queued_prefill_tokens + num_uncached_tokens(query, candidate)
    return profiles.prefill_s(candidate.worker.worker_id, tokens)


def transfer_score_s(query: RouteQuery, candidate: Candidate, profiles: Profiles, block_bytes: int) -> float:
    """Seconds to bring what this worker lacks of the prompt."""
    size = candidate.worker.block_size_tokens
    num_blocks = -(-num_uncached_tokens(query, candidate) // size)
    return profiles.transfer_s(candidate.worker.worker_id, num_blocks * block_bytes)


def decode_score_s(query: RouteQuery, candidate: Candidate, profiles: Profiles, block_bytes: int) -> float:
    """Seconds of a step with ours in it, and of bringing it what it lacks.

    Without room it waits until others end, some `_STEPS_UNTIL_ROOM` later.
    """
    step_s = profiles.decode_step_s(candidate.worker.worker_id, candidate.num_sequences + 1)
    wait_s = 0.0 if has_room(query, candidate) else step_s * _STEPS_UNTIL_ROOM
    return step_s + wait_s + transfer_score_s(query, candidate, profiles, block_bytes)
