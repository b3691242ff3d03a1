"""One output stream to each worker, opened on demand and shared by all requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, Protocol, TypeVar

from tandem.directory.base import WorkerRecord
from tandem.errors import PeerLost, TandemError
from tandem.generation import CallContext, SequenceOutput
from tandem.ids import AttemptId, Epoch, GatewayId, WorkerId
from tandem.request import FinishReason
from tandem.rpc.services import WorkerService
from tandem.tasks import Background

Reply = TypeVar("Reply")

logger = logging.getLogger(__name__)

ATTACH_TIMEOUT_S = 5.0


class Inbox:
    """What one attempt's worker has said and nobody has read; merged, so that it stays small (P32)."""

    def __init__(self) -> None:
        self._waiting: SequenceOutput | None = None
        self._error: TandemError | None = None
        self._wake = asyncio.Event()
        self._broken = asyncio.Event()

    def put(self, output: SequenceOutput) -> None:
        """Add one output behind what waits."""
        self._waiting = output if self._waiting is None else self._waiting.then(output)
        self._wake.set()
        if output.finish is FinishReason.ERROR:
            self._broken.set()

    def fail(self, error: TandemError) -> None:
        """No more will come. What waits can still be read."""
        self._error = error
        self._wake.set()
        self._broken.set()

    async def wait_broken(self) -> None:
        """Return once the attempt is known to have failed there; `get` says how."""
        await self._broken.wait()

    async def get(self) -> SequenceOutput:
        """The next output; raises what `fail` was told once all is read. Safe to cancel."""
        while self._waiting is None:
            if self._error is not None:
                raise self._error
            self._wake.clear()
            await self._wake.wait()
        output, self._waiting = self._waiting, None
        return output


class WorkerLink:
    """One life of one worker, as this gateway sees it. Ends with its stream, and never reopens."""

    def __init__(self, record: WorkerRecord, service: WorkerService) -> None:
        self.record = record
        self.service = service
        self.closed = False
        self._inboxes: dict[AttemptId, Inbox] = {}
        self._attached: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def num_listening(self) -> int:
        """Attempts that listen now."""
        return len(self._inboxes)

    def start(self, gateway_id: GatewayId, background: Background) -> None:
        """Open the stream and read it, until it ends or `stop`. Once only."""
        self._reader = background.spawn(self._read(gateway_id), f"outputs of {self.record.worker_id}")

    def stop(self) -> None:
        """Close the stream; whoever still listens is told so. Idempotent."""
        self._reader.cancel()
        self._end(PeerLost(f"this gateway closed its stream from worker {self.record.worker_id}"))

    @contextmanager
    def listen(self, attempt_id: AttemptId) -> Iterator[Inbox]:
        """An attempt's inbox, for the length of the block."""
        inbox = self._inboxes[attempt_id] = Inbox()
        try:
            yield inbox
        finally:
            del self._inboxes[attempt_id]

    async def wait_attached(self) -> None:
        """Return once the stream stands: outputs of work sent from now on will come. Raises `PeerLost`."""
        try:
            async with asyncio.timeout(ATTACH_TIMEOUT_S):
                await asyncio.shield(self._attached)
        except TimeoutError:
            raise PeerLost(
                f"worker {self.record.worker_id} did not open its output stream in {ATTACH_TIMEOUT_S:g} s"
            ) from None

    async def _read(self, gateway_id: GatewayId) -> None:
        error: TandemError = PeerLost(f"worker {self.record.worker_id} closed its output stream")
        try:
            async with aclosing(self.service.attach(gateway_id, CallContext())) as messages:
                async for outputs in messages:
                    if not self._attached.done():
                        self._attached.set_result(None)
                    for output in outputs:
                        inbox = self._inboxes.get(output.attempt_id)
                        if inbox is not None:
                            inbox.put(output)
        except TandemError as raised:
            error = PeerLost(f"worker {self.record.worker_id} is lost: {raised}")
        finally:
            self._end(error)

    def _end(self, error: TandemError) -> None:
        if self.closed:
            return
        self.closed = True
        if not self._attached.done():
            self._attached.set_exception(error)
            self._attached.exception()  # marks it as seen: perhaps nobody waits
        for inbox in self._inboxes.values():
            inbox.fail(error)


class Peers(Protocol):
    """How a gateway reaches workers: over gRPC, or as objects in the same process."""

    def worker(self, record: WorkerRecord) -> WorkerService:
        """The service of this life of the worker; the same object each time."""
        ...

    async def forget(self, record: WorkerRecord) -> None:
        """This life is over: free what leads to it. Unknown: no-op."""
        ...


class WorkerLinks:
    """All links of one gateway. One stream per worker life, however many ask at once (P11)."""

    def __init__(self, gateway_id: GatewayId, peers: Peers) -> None:
        self.gateway_id = gateway_id
        self._peers = peers
        self._links: dict[tuple[WorkerId, Epoch], WorkerLink] = {}
        self._background = Background()

    @property
    def num_listening(self) -> int:
        """Attempts that listen now, over all workers."""
        return sum(link.num_listening for link in self._links.values())

    def link(self, record: WorkerRecord) -> WorkerLink:
        """The link to this life of the worker, opened if there is none; await `wait_attached` next."""
        key = (record.worker_id, record.epoch)
        link = self._links.get(key)
        if link is None or link.closed:
            link = self._links[key] = WorkerLink(record, self._peers.worker(record))
            link.start(self.gateway_id, self._background)
        return link

    def service(self, record: WorkerRecord) -> WorkerService:
        """The worker's service, for calls whose answer needs no stream."""
        return self._peers.worker(record)

    def call(self, work: Coroutine[Any, Any, Reply], name: str) -> asyncio.Task[Reply]:
        """A call to a worker, as a task that may end later than whoever awaits it."""
        return self._background.spawn(work, name, awaited=True)

    def cancel_later(self, record: WorkerRecord, attempt_id: AttemptId) -> None:
        """Have the worker stop the attempt; returns at once. A lost worker has stopped already."""
        self._background.spawn(self._cancel(record, attempt_id), f"cancel of attempt {attempt_id}")

    def keep_only(self, records: Collection[WorkerRecord]) -> None:
        """Drop the links to lives that are no longer registered, once nobody listens."""
        alive = {(record.worker_id, record.epoch) for record in records}
        for key, link in list(self._links.items()):
            if key not in alive and not link.num_listening:
                del self._links[key]
                link.stop()
                self._background.spawn(
                    self._peers.forget(link.record), f"farewell to {link.record.worker_id}"
                )

    async def aclose(self, grace_s: float = 1.0) -> None:
        """Let cancels go out, then end every stream; the workers abort what is left. Idempotent."""
        links, self._links = self._links, {}
        for link in links.values():
            link.stop()
        await self._background.aclose(grace_s)

    async def _cancel(self, record: WorkerRecord, attempt_id: AttemptId) -> None:
        try:
            await self._peers.worker(record).cancel(attempt_id)
        except TandemError as error:
            logger.info("worker %s was not told to cancel: %s", record.worker_id, error)
