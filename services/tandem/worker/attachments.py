"""The one output stream per gateway: a message a step, and bounded memory for a reader who is slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from tandem.errors import Refused
from tandem.generation import SequenceOutput
from tandem.ids import AttemptId, GatewayId


@dataclass(eq=False, slots=True)
class Attachment:
    """One gateway's open stream, and the attempts whose outputs go there.

    What the reader has not taken yet is merged per attempt, so that it is never more than the
    answers themselves (P32).
    """

    attempts: set[AttemptId] = field(default_factory=set)
    replaced: bool = False
    _waiting: dict[AttemptId, SequenceOutput] = field(default_factory=dict)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, output: SequenceOutput) -> None:
        """Queue one output behind what waits."""
        earlier = self._waiting.get(output.attempt_id)
        self._waiting[output.attempt_id] = output if earlier is None else earlier.then(output)
        self._wake.set()

    def replace(self) -> None:
        """End the stream: the same gateway has opened a newer one."""
        self.replaced = True
        self._wake.set()

    async def messages(self) -> AsyncIterator[tuple[SequenceOutput, ...]]:
        """Everything that waits, each time something does; ends when replaced."""
        while not self.replaced:
            await self._wake.wait()
            self._wake.clear()
            if self._waiting:
                waiting, self._waiting = self._waiting, {}
                yield tuple(waiting.values())


class Attachments:
    """All gateways' streams. An attempt belongs to the stream that was open when it began."""

    def __init__(self) -> None:
        self._open: dict[GatewayId, Attachment] = {}
        self._owners: dict[AttemptId, Attachment] = {}

    @property
    def num_attempts(self) -> int:
        """Attempts that may still have something to say."""
        return len(self._owners)

    def open(self, gateway_id: GatewayId) -> Attachment:
        """A new stream for this gateway, in place of an older one."""
        older = self._open.get(gateway_id)
        if older is not None:
            older.replace()
        attachment = self._open[gateway_id] = Attachment()
        return attachment

    def close(self, gateway_id: GatewayId, attachment: Attachment) -> frozenset[AttemptId]:
        """Forget a stream; returns the attempts that lose their reader, for the caller to abort."""
        if self._open.get(gateway_id) is attachment:
            del self._open[gateway_id]
        return frozenset(attachment.attempts)

    def register(self, attempt_id: AttemptId, gateway_id: GatewayId) -> None:
        """Send this attempt's outputs to that gateway. Raises `Refused`."""
        attachment = self._open.get(gateway_id)
        if attachment is None:
            raise Refused(f"gateway {gateway_id} has no output stream here; attach before sending work")
        if attempt_id in self._owners:
            raise Refused(f"attempt {attempt_id} is here already; draw a new id for every try")
        self._owners[attempt_id] = attachment
        attachment.attempts.add(attempt_id)

    def forget(self, attempt_id: AttemptId) -> None:
        """No more outputs of this attempt. Unknown: no-op."""
        attachment = self._owners.pop(attempt_id, None)
        if attachment is not None:
            attachment.attempts.discard(attempt_id)

    def deliver(self, output: SequenceOutput) -> None:
        """Pass one output on; the last one forgets the attempt. Unknown: dropped."""
        attachment = self._owners.get(output.attempt_id)
        if attachment is None:
            return
        attachment.put(output)
        if output.finish is not None:
            self.forget(output.attempt_id)
