"""One sequence's way through the workers: routed, sent, read to its end, and tried again once.

A try is an *attempt* with an id of its own. Whatever ends it, its booking is settled once and the
workers that may still hold something of it are told to cancel.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace

from tandem.clock import Clock, Deadline
from tandem.directory.base import Directory, WorkerRecord
from tandem.errors import NoWorker, PeerLost, TandemError
from tandem.gateway.faults import WorkerFault, blaming, checked, deadline_exceeded
from tandem.gateway.learning import learn
from tandem.gateway.links import Inbox, WorkerLink, WorkerLinks
from tandem.gateway.prompt import Prompt
from tandem.generation import CallContext, Phase, PhaseTiming, SequenceOutput, SequenceSpec
from tandem.ids import AttemptId, IdSource, WorkerId
from tandem.kv.ticket import Ticket
from tandem.request import FinishReason, SamplingParams
from tandem.routing.query import Route, RouteQuery
from tandem.routing.router import Router
from tandem.telemetry import names

_WIND_DOWN_S = 1.0


@dataclass(slots=True)
class Job:
    """One choice of one request: what every attempt at it has in common.

    `stop_early` is set by whoever reads the outputs when no more tokens are wanted.
    """

    prompt: Prompt
    sampling: SamplingParams
    seed: int
    context: CallContext
    priority: int = 0
    session_id: str = ""
    stop_early: bool = False


@dataclass(slots=True)
class _Attempt:
    """One try under way. `finished`: its decode worker has said its last word."""

    spec: SequenceSpec
    route: Route
    context: CallContext
    finished: bool = field(default=False)

    @property
    def workers(self) -> tuple[WorkerRecord, ...]:
        """Everyone who may hold something of it."""
        return tuple(worker for worker in (self.route.decode, self.route.prefill) if worker is not None)


class Dispatcher:
    """Runs jobs. All methods on one event loop; any number of jobs at once."""

    def __init__(
        self,
        router: Router,
        directory: Directory,
        links: WorkerLinks,
        *,
        layout_fingerprint: str,
        block_bytes: int,
        clock: Clock,
        ids: IdSource,
    ) -> None:
        self._router = router
        self._directory = directory
        self._links = links
        self._layout_fingerprint = layout_fingerprint
        self._block_bytes = block_bytes
        self._clock = clock
        self._ids = ids

    async def run(self, job: Job) -> AsyncGenerator[SequenceOutput]:
        """The outputs of the job; the last one has `finish`. Phases come as they end.

        A worker's failure before the first token is tried once more without that worker (P37);
        later it raises. Closing the generator cancels everywhere.
        """
        first_fault: WorkerFault | None = None
        begun = False
        while True:
            excluded = frozenset[WorkerId]() if first_fault is None else {first_fault.worker.worker_id}
            try:
                async with aclosing(self._attempt(job, frozenset(excluded))) as outputs:
                    async for output in outputs:
                        begun = begun or bool(output.tokens)
                        yield output
                return
            except WorkerFault as fault:
                if isinstance(fault.error, PeerLost):
                    self._report_lost(fault.worker)
                if begun or first_fault is not None:
                    raise fault.error from fault
                first_fault = fault
            except NoWorker:
                if first_fault is None:
                    raise
                raise first_fault.error from first_fault  # what is wrong, rather than who is left

    async def _attempt(self, job: Job, excluded: frozenset[WorkerId]) -> AsyncGenerator[SequenceOutput]:
        attempt_id = AttemptId(self._ids.hex128())
        route, timing = self._route(job, attempt_id, excluded)
        attempt = _Attempt(self._spec(job, attempt_id), route, job.context)
        try:
            yield SequenceOutput(attempt_id, phases=(timing,))
            with blaming(route.decode):
                link = self._links.link(route.decode)
                await link.wait_attached()
            with link.listen(attempt_id) as inbox:
                async with aclosing(self._outputs(job, attempt, link, inbox)) as outputs:
                    async for output in outputs:
                        learn(self._router, output.phases)
                        yield output
        finally:
            self._router.settle(attempt_id)
            if not attempt.finished:
                for worker in attempt.workers:
                    self._links.cancel_later(worker, attempt_id)

    def _route(
        self, job: Job, attempt_id: AttemptId, excluded: frozenset[WorkerId]
    ) -> tuple[Route, PhaseTiming]:
        start_ns, start_s = self._clock.wall_ns(), self._clock.monotonic_s()
        workers = self._directory.membership.workers()
        self._links.keep_only(workers)
        query = RouteQuery(
            attempt_id=attempt_id,
            num_prompt_tokens=len(job.prompt.token_ids),
            num_hashes=len(job.prompt.hashes),
            layout_fingerprint=self._layout_fingerprint,
            priority=job.priority,
            session_id=job.session_id,
            excluded=excluded,
            block_bytes=self._block_bytes,
        )
        route = self._router.route(query, workers, self._directory.index.match(job.prompt.hashes), start_s)
        attributes: dict[str, int | float | str] = {
            names.ATTEMPT_ID: attempt_id,
            names.ROUTE_DECODE: route.decode.worker_id,
            "reason": route.reason.value,
        }
        if route.prefill is not None:
            attributes[names.ROUTE_PREFILL] = route.prefill.worker_id
        duration_s = self._clock.monotonic_s() - start_s
        return route, PhaseTiming(Phase.ROUTE, start_ns, duration_s, attributes)

    def _spec(self, job: Job, attempt_id: AttemptId) -> SequenceSpec:
        return SequenceSpec(
            attempt_id=attempt_id,
            token_ids=job.prompt.token_ids,
            num_prompt_tokens=len(job.prompt.token_ids),
            sampling=job.sampling,
            seed=job.seed,
            chain_root=job.prompt.chain_root,
            priority=job.priority,
            deadline=job.context.deadline,
        )

    async def _outputs(
        self, job: Job, attempt: _Attempt, link: WorkerLink, inbox: Inbox
    ) -> AsyncGenerator[SequenceOutput]:
        """From sending the sequence out to its last word."""
        spec, decode = attempt.spec, attempt.route.decode
        if attempt.route.prefill is None:
            with blaming(decode):
                async with self._within(spec.deadline):
                    await link.service.submit(spec, self._links.gateway_id, attempt.context)
        else:
            with blaming(decode):
                async with self._within(spec.deadline):
                    ticket = await link.service.reserve(spec, self._links.gateway_id, attempt.context)
            first = await self._prefill(attempt, attempt.route.prefill, ticket, inbox)
            self._router.prompt_done(spec.attempt_id)
            yield first
            if job.stop_early:
                return
        while not attempt.finished:
            with blaming(decode):
                async with self._within(spec.deadline):
                    output = checked(await inbox.get())
            self._router.prompt_done(spec.attempt_id)
            attempt.finished = output.finish is not None
            yield output
            if job.stop_early and not attempt.finished:
                yield await self._wind_down(attempt, link, inbox)

    async def _prefill(
        self, attempt: _Attempt, worker: WorkerRecord, ticket: Ticket, inbox: Inbox
    ) -> SequenceOutput:
        """The first token from the prefill worker, unless the decode worker fails before."""
        spec = attempt.spec
        call = self._links.call(
            self._links.service(worker).prefill(spec, ticket, self._links.gateway_id, attempt.context),
            f"prefill of attempt {spec.attempt_id}",
        )
        broken = asyncio.ensure_future(inbox.wait_broken())
        try:
            async with self._within(spec.deadline):
                await asyncio.wait((call, broken), return_when=asyncio.FIRST_COMPLETED)
            if broken.done():
                with blaming(attempt.route.decode):
                    checked(await inbox.get())
            with blaming(worker):
                result = await call
        finally:
            broken.cancel()
            call.cancel()  # and never awaited: a worker that hangs holds nobody up (P8)
        return SequenceOutput(
            attempt.spec.attempt_id,
            (result.first_token,),
            num_cached_tokens=result.num_cached_tokens,
            phases=result.phases,
        )

    @asynccontextmanager
    async def _within(self, deadline: Deadline | None) -> AsyncIterator[None]:
        """Bound a block that waits for a worker. Raises `DeadlineExceeded`."""
        try:
            async with asyncio.timeout(None if deadline is None else deadline.remaining_s(self._clock)):
                yield
        except TimeoutError:
            raise deadline_exceeded() from None

    async def _wind_down(self, attempt: _Attempt, link: WorkerLink, inbox: Inbox) -> SequenceOutput:
        """End early: the decode worker stops, and says how long its phases were. Never fails."""
        attempt_id = attempt.spec.attempt_id
        attempt.finished = True
        last = SequenceOutput(attempt_id, finish=FinishReason.STOP)
        try:
            async with asyncio.timeout(_WIND_DOWN_S):
                await link.service.cancel(attempt_id)
                while (output := await inbox.get()).finish is None:
                    pass
        except (TandemError, TimeoutError):
            self._links.cancel_later(attempt.route.decode, attempt_id)
            return last
        return replace(last, phases=output.phases)

    def _report_lost(self, worker: WorkerRecord) -> None:
        self._router.report_failure(worker.worker_id, self._clock.monotonic_s(), worker.epoch)
