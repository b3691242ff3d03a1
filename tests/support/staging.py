"""Gates in a cluster's two planes: a test lets each engine step and each KV message pass, or not."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tandem.engine.batch import BatchInput
from tandem.engine.model_runner import ModelRunner
from tandem.transport.inproc import InprocTransport


class Gate:
    """Lets so many pass; open by default. Closed for a thread, watched from an event loop."""

    def __init__(self) -> None:
        self.num_passed = 0
        self._condition = threading.Condition()
        self._allowed: float = float("inf")
        self._num_waiting = 0
        self._watchers: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def allow(self, num: float) -> None:
        """Let `num` more pass, counted from now."""
        with self._condition:
            self._allowed = self.num_passed + num
            self._condition.notify_all()

    def open(self) -> None:
        """Let all pass."""
        self.allow(float("inf"))

    def pass_through(self) -> None:
        """Called in the thread that is held up."""
        with self._condition:
            self._num_waiting += 1
            for loop, event in self._watchers:
                loop.call_soon_threadsafe(event.set)
            self._condition.wait_for(lambda: self.num_passed < self._allowed, timeout=60)
            self._num_waiting -= 1
            self.num_passed += 1

    async def wait_held(self) -> None:
        """Return once somebody stands before the closed gate."""
        event = asyncio.Event()
        with self._condition:
            self._watchers.append((asyncio.get_running_loop(), event))
            if self._num_waiting and self.num_passed >= self._allowed:
                event.set()
        while True:
            await asyncio.wait_for(event.wait(), 30)
            with self._condition:
                if self._num_waiting and self.num_passed >= self._allowed:
                    return
            event.clear()


class Stage:
    """The gates of one cluster: workers in the order of their making, prefill first."""

    def __init__(self) -> None:
        self.steps: list[Gate] = []
        self._held: list[tuple[InprocTransport, tuple[Any, ...]]] | None = None
        self._released = asyncio.Event()

    @property
    def num_messages_held(self) -> int:
        """KV messages on their way."""
        return len(self._held or ())

    def hold_messages(self) -> None:
        """From now on KV messages stay on their way."""
        self._held = []
        self._released.clear()

    async def release_messages(self) -> None:
        """Deliver what was held up, also what its sender has given up since."""
        held, self._held = self._held or [], None
        for transport, message in held:
            await InprocTransport.deliver(transport, *message)
        self._released.set()

    async def carry(self, transport: InprocTransport, *message: Any) -> None:
        """Deliver one message, now or when it is released."""
        if self._held is None:
            await InprocTransport.deliver(transport, *message)
        else:
            self._held.append((transport, message))
            await self._released.wait()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Gates in every cluster that the test opens."""
    stage = Stage()

    class StagedRunner(ModelRunner):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.gate = Gate()
            stage.steps.append(self.gate)

        def forward(self, batch: BatchInput) -> Any:
            self.gate.pass_through()
            return super().forward(batch)

    class StagedTransport(InprocTransport):
        async def deliver(self, *message: Any) -> None:
            await stage.carry(self, *message)

    monkeypatch.setattr("tandem.worker.node.ModelRunner", StagedRunner)
    monkeypatch.setattr("tandem.cluster.local.open_transport", lambda kind: StagedTransport())
    return stage
