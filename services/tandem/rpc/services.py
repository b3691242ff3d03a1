"""The services, in domain types. gRPC, Ray and `LocalCluster` are thin adapters around these."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.directory.base import WorkerRecord
from tandem.generation import CallContext as CallContext
from tandem.generation import PhaseTiming, SequenceOutput, SequenceSpec, TokenOutput
from tandem.generation import PrefillResult as PrefillResult
from tandem.ids import AttemptId, GatewayId, TransferId
from tandem.kv.ticket import FinalWord, Hello, Ticket
from tandem.request import FinishReason, Request, Usage


@dataclass(frozen=True, slots=True)
class GenerateChunk:
    """Part of one choice's answer. Several tokens may share a chunk; text may lag behind tokens.

    The last chunk of a choice has `finish`; the last chunk of the request also has `usage`,
    `phases` (of all processes, in order) and the `trace_id`.
    """

    index: int = 0
    text: str = ""
    tokens: tuple[TokenOutput, ...] = ()
    finish: FinishReason | None = None
    usage: Usage | None = None
    phases: tuple[PhaseTiming, ...] = ()
    request_id: str = ""
    trace_id: str = ""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A served model, as clients see it."""

    model_id: str
    revision: str
    max_context_tokens: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a gateway says of itself and its workers."""

    version: str
    models: tuple[ModelCard, ...]
    workers: tuple[WorkerRecord, ...]


@dataclass(frozen=True, slots=True)
class TokenizeResult:
    """Token ids and, for a chat, the text that the template made of it."""

    token_ids: tuple[int, ...]


class InferenceService(Protocol):
    """What users call; served by the gateway."""

    def generate(self, request: Request, context: CallContext) -> AsyncGenerator[GenerateChunk]:
        """Stream the answer. Closing the iterator cancels the request everywhere."""
        ...

    async def tokenize(self, request: Request) -> TokenizeResult:
        """Tokenise `prompt` or `messages` as `generate` would."""
        ...

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens kept out."""
        ...

    async def list_models(self) -> tuple[ModelCard, ...]:
        """The models served here."""
        ...

    async def server_info(self) -> ServerInfo:
        """Version, models and workers."""
        ...


class WorkerService(Protocol):
    """What a gateway calls on a worker. Every worker can do all of it, whatever its pool."""

    def attach(
        self, gateway_id: GatewayId, context: CallContext
    ) -> AsyncGenerator[tuple[SequenceOutput, ...]]:
        """One message per engine step with all of this gateway's sequences.

        Its end, for whatever reason, aborts every sequence of that gateway on this worker. The
        first message is empty and says that the attachment stands.
        """
        ...

    async def submit(self, spec: SequenceSpec, gateway_id: GatewayId, context: CallContext) -> None:
        """Run the whole sequence here; outputs come by `attach`. Raises `Overloaded`, `Draining`."""
        ...

    async def reserve(self, spec: SequenceSpec, gateway_id: GatewayId, context: CallContext) -> Ticket:
        """Reserve blocks for the prompt, post the receives, and promise to decode once filled.

        Outputs come by `attach`, from the second token on: the first one is the sender's.
        Raises `OutOfBlocks`, `Draining`.
        """
        ...

    async def prefill(
        self, spec: SequenceSpec, ticket: Ticket, gateway_id: GatewayId, context: CallContext
    ) -> PrefillResult:
        """Compute the prompt, send its blocks under the ticket, and return the first token.

        Raises `LayoutMismatch`, `TicketRefused`, `TransferFailed`, `PeerLost`, `Overloaded`.
        """
        ...

    async def cancel(self, attempt_id: AttemptId) -> None:
        """Stop the attempt in whatever state it is. Unknown or finished: no-op."""
        ...

    async def describe(self) -> WorkerRecord:
        """This worker's record as of now."""
        ...


class TransferService(Protocol):
    """What a sending worker calls on the receiving one."""

    async def handshake(self, hello: Hello, context: CallContext) -> Hello:
        """Exchange identities. Raises `LayoutMismatch`."""
        ...

    async def finish(self, word: FinalWord, context: CallContext) -> None:
        """The final word of a transfer. Raises `TicketRefused` for an unknown or used one."""
        ...

    async def renew(self, transfer_ids: Sequence[TransferId], context: CallContext) -> tuple[TransferId, ...]:
        """Move these leases later; returns those that are unknown here, so that they are seen."""
        ...
