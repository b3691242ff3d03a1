"""The router: pure decisions over a snapshot, plus a book of what it has sent where.

Time and randomness come in as arguments, so that a simulation replays it exactly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tandem.config.choices import DisaggregationMode
from tandem.directory.base import Role, WorkerRecord
from tandem.errors import InternalError
from tandem.ids import AttemptId, Epoch, WorkerId
from tandem.routing.disaggregation import choose_place
from tandem.routing.filters import eligible, explain_none, num_blocks_wanted
from tandem.routing.load_book import Booking, LoadBook
from tandem.routing.profiles import Profiles
from tandem.routing.query import Route, RouteQuery, RouteReason, RouterPolicy
from tandem.routing.scorers import (
    Candidate,
    decode_score_s,
    num_cached_tokens,
    num_uncached_tokens,
    prefill_score_s,
    transfer_score_s,
)

PickIndex = Callable[[int], int]
"""Given n, an index in [0, n), evenly at random; `random.randrange` fits."""


_SPARE_PROFILES = 64  # a worker that blinks keeps its profile; names that never return don't pile up


@dataclass(frozen=True, slots=True)
class _Inhibition:
    until_s: float
    epoch: Epoch | None


class Router:
    """Chooses and books. Mutable (book, profiles, inhibitions); call it from one thread."""

    def __init__(self, policy: RouterPolicy, pick_index: PickIndex, profiles: Profiles | None = None) -> None:
        self.policy = policy
        self.book = LoadBook()
        self.profiles = profiles or Profiles()
        self._pick_index = pick_index
        self._inhibitions: dict[WorkerId, _Inhibition] = {}

    def route(
        self,
        query: RouteQuery,
        workers: Sequence[WorkerRecord],
        matches: Mapping[WorkerId, int],
        now_s: float,
    ) -> Route:
        """Choose workers for one attempt and book them; `settle` must follow, once, whatever happens.

        `matches` is leading blocks held, by worker. Raises `NoWorker`, or `OutOfBlocks` for a prompt
        that can never fit, with nothing booked.
        """
        if query.num_prompt_tokens < 1:
            raise InternalError("a query needs at least one prompt token; the validator lets none pass")
        inhibited_s = self._inhibited(workers, now_s)
        if self.profiles.num_workers > 2 * len(workers) + _SPARE_PROFILES:
            self.profiles.keep_only(frozenset(worker.worker_id for worker in workers))
        decode = self._best_decode(query, workers, matches, inhibited_s)
        prefill = self._best_prefill(query, workers, matches, inhibited_s)
        route = self._place(query, decode, prefill)
        self.book.book(
            Booking(
                attempt_id=query.attempt_id,
                decode=route.decode.worker_id,
                prefill=(route.prefill or route.decode).worker_id,
                num_prefill_tokens=query.num_prompt_tokens
                - (route.num_cached_prefill_tokens if route.prefill else route.num_cached_decode_tokens),
                num_blocks=num_blocks_wanted(query, route.decode),
            )
        )
        return route

    def prompt_done(self, attempt_id: AttemptId) -> None:
        """The first token is there: its prefill load is over. Idempotent."""
        self.book.prompt_done(attempt_id)

    def settle(self, attempt_id: AttemptId) -> bool:
        """The attempt has ended. True the first time; later calls and unknown ids do nothing."""
        return self.book.settle(attempt_id)

    def report_failure(self, worker_id: WorkerId, now_s: float, epoch: Epoch | None = None) -> None:
        """Avoid this worker from now on for `inhibit_s`; a newer life than `epoch` is not avoided.

        Only for failures of the worker (connection, hang, crash), never for a client's errors.
        """
        self._inhibitions[worker_id] = _Inhibition(now_s + self.policy.inhibit_s, epoch)

    def report_success(self, worker_id: WorkerId) -> None:
        """A probe or a call succeeded: the worker is no longer avoided."""
        self._inhibitions.pop(worker_id, None)

    def _inhibited(self, workers: Iterable[WorkerRecord], now_s: float) -> dict[WorkerId, float]:
        """Seconds left, by avoided worker; what has ended is forgotten."""
        epochs = {worker.worker_id: worker.epoch for worker in workers}
        for worker_id, inhibition in list(self._inhibitions.items()):
            epoch = epochs.get(worker_id)
            reborn = epoch is not None and inhibition.epoch is not None and epoch > inhibition.epoch
            if reborn or inhibition.until_s <= now_s:
                del self._inhibitions[worker_id]
        return {worker_id: each.until_s - now_s for worker_id, each in self._inhibitions.items()}

    def _best_decode(
        self,
        query: RouteQuery,
        workers: Sequence[WorkerRecord],
        matches: Mapping[WorkerId, int],
        inhibited_s: Mapping[WorkerId, float],
    ) -> Candidate:
        found = eligible(query, workers, Role.DECODE, inhibited_s)
        if not found:
            raise explain_none(query, workers, Role.DECODE, inhibited_s)
        block_bytes = self._block_bytes(query)
        return self._best(
            query,
            [self._candidate(worker, matches) for worker in found],
            lambda candidate: decode_score_s(query, candidate, self.profiles, block_bytes),
        )

    def _best_prefill(
        self,
        query: RouteQuery,
        workers: Sequence[WorkerRecord],
        matches: Mapping[WorkerId, int],
        inhibited_s: Mapping[WorkerId, float],
    ) -> Candidate | None:
        if self.policy.mode is DisaggregationMode.NEVER:
            return None
        found = eligible(query, workers, Role.PREFILL, inhibited_s)
        if found:
            return self._best(
                query,
                [self._candidate(worker, matches) for worker in found],
                lambda candidate: prefill_score_s(query, candidate, self.profiles),
            )
        if self.policy.mode is DisaggregationMode.ALWAYS:
            raise explain_none(query, workers, Role.PREFILL, inhibited_s)
        return None

    def _place(self, query: RouteQuery, decode: Candidate, prefill: Candidate | None) -> Route:
        """Compare computing the prompt here and there."""
        local_s = prefill_score_s(query, decode, self.profiles)
        remote_s = None
        if prefill is None:
            never = self.policy.mode is DisaggregationMode.NEVER
            remote, reason = False, RouteReason.MODE if never else RouteReason.NO_PREFILL_WORKER
        else:
            remote_s = prefill_score_s(query, prefill, self.profiles) + transfer_score_s(
                query, decode, self.profiles, self._block_bytes(query)
            )
            remote, reason = choose_place(
                self.policy,
                num_uncached_decode_tokens=num_uncached_tokens(query, decode),
                block_size_tokens=decode.worker.block_size_tokens,
                local_s=local_s,
                remote_s=remote_s,
                num_running=decode.num_sequences,
            )
        return Route(
            decode=decode.worker,
            prefill=prefill.worker if prefill is not None and remote else None,
            reason=reason,
            num_cached_decode_tokens=num_cached_tokens(query, decode),
            num_cached_prefill_tokens=num_cached_tokens(query, prefill) if prefill else 0,
            predicted_local_s=local_s,
            predicted_remote_s=remote_s,
        )

    def _best(
        self, query: RouteQuery, candidates: Sequence[Candidate], score: Callable[[Candidate], float]
    ) -> Candidate:
        """The lowest score. Among equals a session keeps its worker; without one chance decides."""
        scored = [(score(candidate), candidate) for candidate in candidates]
        limit = min(value for value, _ in scored) * (1.0 + self.policy.tie_margin)
        tied = [candidate for value, candidate in scored if value <= limit]
        if query.session_id:
            return max(tied, key=lambda candidate: _affinity(query.session_id, candidate.worker.worker_id))
        return tied[self._pick_index(len(tied))]

    def _candidate(self, worker: WorkerRecord, matches: Mapping[WorkerId, int]) -> Candidate:
        return Candidate(worker, self.book.load_of(worker.worker_id), matches.get(worker.worker_id, 0))

    def _block_bytes(self, query: RouteQuery) -> int:
        return query.block_bytes if query.block_bytes is not None else self.policy.block_bytes


def _affinity(session_id: str, worker_id: WorkerId) -> bytes:
    """Rendezvous hashing (Thaler & Ravishankar, 1998): the same order in every gateway, no state."""
    return hashlib.blake2b(f"{len(session_id)}:{session_id}{worker_id}".encode(), digest_size=8).digest()
