"""The engine's thread: steps run there, callers stay on the event loop.

Commands go in by a queue and a condition, answers come back by `call_soon_threadsafe`; nothing
polls. All commands that have come in are applied between two steps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Any

from tandem.engine.engine import Engine
from tandem.engine.results import Reservation, StepResult
from tandem.errors import Draining, InternalError, Refused, TandemError
from tandem.generation import PhaseTiming, SequenceSpec, TokenOutput, WorkerLoad
from tandem.ids import AttemptId
from tandem.kv.events import KvEvent

logger = logging.getLogger(__name__)

_MAX_WAIT_S = 3600.0


@dataclass(frozen=True, slots=True)
class _Command:
    """A verb for the engine's thread, and the future of whoever called it.

    The future is settled once the verb has run or raised; with `answered_later` only if it raised.
    """

    verb: Callable[[], None]
    future: asyncio.Future[Any] | None = None
    answered_later: bool = False


_Settled = tuple[asyncio.Future[Any], Exception | None]


class EngineLoop:
    """Runs one engine in one thread. Every method is called on the event loop that called `start`.

    Calls take effect between steps, in the order in which they were made. Before `start`, and once
    `stop` was called, they raise `Draining`.
    """

    def __init__(self, engine: Engine, on_step: Callable[[StepResult], None]) -> None:
        """`on_step` runs on the event loop, after each step with outputs or exports. Must not block."""
        self._engine = engine
        self._on_step = on_step
        self._wakeup = Condition()
        self._commands: list[_Command] = []
        self._open = False
        self._thread: Thread | None = None
        self._ended = asyncio.Event()
        self._grants: dict[AttemptId, asyncio.Future[Reservation]] = {}
        self._load = engine.load()

    @property
    def alive(self) -> bool:
        """True while the thread takes commands; false for good after `stop` or a fatal bug."""
        return self._open

    async def start(self) -> None:
        """Start the thread. Once only."""
        if self._thread is not None:
            raise InternalError("this engine loop was started before; make a new one")
        self._event_loop = asyncio.get_running_loop()
        self._open = True
        self._thread = Thread(target=self._run, name="tandem-engine", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after the step in progress. Idempotent.

        Sequences that wait or run end with an error; every call that is still waiting raises
        `Draining`. Held and reserved blocks are no longer anybody's concern.
        """
        if self._thread is None:
            return
        with self._wakeup:
            self._open = False
            self._wakeup.notify()
        await self._ended.wait()
        self._thread.join()

    async def submit(self, spec: SequenceSpec) -> None:
        """Run the whole sequence here; returns once queued.

        Raises `Overloaded`, `OutOfBlocks` (can never fit), `InvalidRequest`, `Refused` (known id).
        Cancelling the call aborts the sequence.
        """
        try:
            await self._call(lambda: self._engine.submit(spec))
        except asyncio.CancelledError:
            self._post(lambda: self._engine.abort(spec.attempt_id))
            raise

    async def export(self, spec: SequenceSpec) -> None:
        """Compute the prompt and one token, then hold the blocks until `release`; returns once queued.

        Progress comes by `on_step`. Raises as `submit`; cancelling the call releases.
        """
        try:
            await self._call(lambda: self._engine.export(spec))
        except asyncio.CancelledError:
            self._post(lambda: self._engine.release(spec.attempt_id))
            raise

    async def reserve(self, spec: SequenceSpec) -> Reservation:
        """Blocks for the whole prompt, leading ones perhaps filled; waits its turn for free ones.

        Raises `OutOfBlocks` when they can never fit or too many wait, `DeadlineExceeded` when the
        sequence's deadline passes first, `Cancelled` when it is aborted. Cancelling the call
        releases, also when the grant was on its way.
        """
        attempt_id = spec.attempt_id
        if attempt_id in self._grants:
            raise Refused(f"attempt {attempt_id} is waiting for blocks already; draw a new id for every try")
        grant: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        self._grants[attempt_id] = grant
        try:
            self._send(_Command(lambda: self._engine.reserve(spec), grant, answered_later=True))
            return await grant
        except asyncio.CancelledError:
            self._post(lambda: self._engine.release(attempt_id))
            raise
        finally:
            del self._grants[attempt_id]

    async def admit(
        self, attempt_id: AttemptId, first_token: TokenOutput, phases: tuple[PhaseTiming, ...] = ()
    ) -> None:
        """Run a reserved sequence whose blocks are all filled. Raises `Refused`, `Cancelled`.

        The sequence's last output tells `phases` too, between the wait for blocks and the decode.
        """
        await self._call(lambda: self._engine.admit(attempt_id, first_token, phases))

    async def abort(self, attempt_id: AttemptId) -> None:
        """Stop computing; returns once stopped. Exported and reserved blocks stay. Unknown: no-op."""
        await self._call(lambda: self._engine.abort(attempt_id))

    async def release(self, attempt_id: AttemptId) -> None:
        """Free exported or reserved blocks; returns once freed. Unknown or admitted: no-op."""
        await self._call(lambda: self._engine.release(attempt_id))

    async def flush(self) -> None:
        """Return once everything that earlier calls brought about has been delivered."""
        await self._call(lambda: None)

    def load(self) -> WorkerLoad:
        """The load after the latest step. From memory."""
        return self._load

    def drain_kv_events(self) -> list[KvEvent]:
        """What entered and left the prefix cache since the last call, as a net effect."""
        return self._engine.kv_events.drain()

    def snapshot_kv_events(self) -> list[KvEvent]:
        """All that the prefix cache holds, told from scratch, for an index that lost track."""
        return self._engine.kv_events.snapshot()

    # On the event loop

    async def _call(self, verb: Callable[[], None]) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._send(_Command(verb, future))
        await future

    def _send(self, command: _Command) -> None:
        with self._wakeup:
            if not self._open:
                raise Draining("the engine is not running; send this to another worker")
            self._commands.append(command)
            self._wakeup.notify()

    def _post(self, verb: Callable[[], None]) -> None:
        """Like `_send`, for the clean-up of a call that nobody waits for any more."""
        with self._wakeup:
            if self._open:
                self._commands.append(_Command(verb))
                self._wakeup.notify()

    def _deliver(self, settled: list[_Settled], result: StepResult | None) -> None:
        for future, error in settled:
            if not future.done():
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)
        if result is None:
            return
        for reservation in result.reservations:
            grant = self._grants.get(reservation.attempt_id)
            if grant is not None and not grant.done():
                grant.set_result(reservation)
        for refusal in result.refusals:
            grant = self._grants.get(refusal.attempt_id)
            if grant is not None and not grant.done():
                grant.set_exception(refusal.error)
        if result.outputs or result.exports:
            self._on_step(result)

    def _finish(self, error: TandemError) -> None:
        for grant in self._grants.values():
            if not grant.done():
                grant.set_exception(error)
        self._ended.set()

    # On the engine's thread

    def _run(self) -> None:
        error: TandemError = Draining("the engine was stopped")
        try:
            while (commands := self._next_commands()) is not None:
                if commands:
                    self._hand_over(self._apply(commands), None)
                result = self._step()
                self._load = self._engine.load()
                if result:
                    self._hand_over([], result)
        except Exception:
            logger.exception("the engine's thread died of a bug")
            error = InternalError("the engine died of a bug; restart the worker and see its log")
        finally:
            self._close(error)

    def _next_commands(self) -> list[_Command] | None:
        """Wait until there is something to do; None once stopped."""
        with self._wakeup:
            if self._open and self._engine.idle and not self._commands:
                until_deadline_s = self._engine.until_deadline_s()
                self._wakeup.wait(
                    _MAX_WAIT_S if until_deadline_s is None else min(until_deadline_s, _MAX_WAIT_S)
                )
            if not self._open:
                return None
            commands, self._commands = self._commands, []
            return commands

    def _apply(self, commands: list[_Command]) -> list[_Settled]:
        settled: list[_Settled] = []
        for command in commands:
            error: Exception | None = None
            try:
                command.verb()
            except Exception as raised:
                error = raised
            if command.future is not None and (error is not None or not command.answered_later):
                settled.append((command.future, error))
        return settled

    def _step(self) -> StepResult:
        try:
            return self._engine.step()
        except Exception as error:
            logger.exception("a step failed outside the model; its sequences are ended")
            return self._engine.fail_all(error)

    def _close(self, error: TandemError) -> None:
        with self._wakeup:
            self._open = False
            left, self._commands = self._commands, []
        unanswered: list[_Settled] = [
            (command.future, error) for command in left if command.future is not None
        ]
        try:
            result: StepResult | None = self._engine.fail_all(error)
        except Exception:
            logger.exception("the engine could not end its sequences")
            result = None
        self._load = self._engine.load()
        self._hand_over(unanswered, result)
        if not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(self._finish, error)

    def _hand_over(self, settled: list[_Settled], result: StepResult | None) -> None:
        if not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(self._deliver, settled, result)
