"""Services without a model behind them: they record what they are asked and answer from a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.directory.base import Role, WorkerLoad, WorkerRecord, WorkerState
from tandem.generation import (
    CallContext,
    Phase,
    PhaseTiming,
    PrefillResult,
    SequenceOutput,
    SequenceSpec,
    TokenLogprob,
    TokenOutput,
)
from tandem.ids import AttemptId, Epoch, GatewayId, TransferId, WorkerId
from tandem.kv.ticket import FinalWord, Hello, PeerAddress, Ticket
from tandem.request import FinishReason, Request, SamplingParams, Usage
from tandem.rpc.services import GenerateChunk, ModelCard, ServerInfo, TokenizeResult

ATTEMPT = AttemptId("0123456789abcdef" * 2)
TRANSFER = TransferId("fedcba9876543210" * 2)
GATEWAY = GatewayId("gateway-1")
PEER = PeerAddress(WorkerId("decode-0"), Epoch(7), "127.0.0.1:50061", b"\x00ucx\xff")
SPEC = SequenceSpec(ATTEMPT, (1, 2, 3), 3, SamplingParams(), seed=5, chain_root=b"r" * 16)
TICKET = Ticket(TRANSFER, ATTEMPT, PEER, "f" * 16, 0, 1, 3, 0, 10.0)
HELLO = Hello(1, PEER, "f" * 16)
RECORD = WorkerRecord(
    address=PEER,
    role=Role.DECODE,
    state=WorkerState.READY,
    model_id="smollm2",
    layout_fingerprint="f" * 16,
    block_size_tokens=16,
    num_blocks=100,
    max_context_tokens=2048,
    load=WorkerLoad(99),
    capabilities={"transport": "ucx"},
)
CARD = ModelCard("smollm2", "rev", 2048, 49152)
CHUNKS = (
    GenerateChunk(text="Hel", tokens=(TokenOutput(5, -0.25, (TokenLogprob(5, -0.25),)), TokenOutput(6))),
    GenerateChunk(text="lo 🌍"),
    GenerateChunk(
        finish=FinishReason.LENGTH,
        usage=Usage(3, 0, 2),
        phases=(PhaseTiming(Phase.DECODE, 10, 0.5, {"tokens": 2, "rate": 4.0, "worker": "decode-0"}),),
        request_id="mine",
        trace_id="t" * 32,
    ),
)


@dataclass
class Staged:
    """How a fake behaves: what it raises, where it waits, and what was seen of its end."""

    error: Exception | None = None
    hold: bool = False
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    ended_by: type[BaseException] | None = None
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    async def act(self, *call: Any) -> None:
        """Record the call, then wait and raise as staged."""
        self.calls.append(call)
        self.entered.set()
        try:
            if self.hold:
                await self.go_on.wait()
            if self.error is not None:
                raise self.error
        except BaseException as error:
            self.ended_by = type(error)
            raise
        finally:
            self.closed.set()

    async def stream(self, values: Sequence[Any], *call: Any, endless: bool = False) -> AsyncIterator[Any]:
        """Yield `values` (for ever if `endless`), hold after the first, raise after the last."""
        self.calls.append(call)
        self.entered.set()
        try:
            for at, value in enumerate(values):
                if at == 1 and self.hold:
                    await self.go_on.wait()
                yield value
            while endless:
                yield values[-1]
            if self.error is not None:
                raise self.error
        except BaseException as error:
            self.ended_by = type(error)
            raise
        finally:
            self.closed.set()


class FakeInference:
    """An `InferenceService`."""

    def __init__(self) -> None:
        self.staged = Staged()
        self.chunks: Sequence[GenerateChunk] = CHUNKS
        self.endless = False

    def generate(self, request: Request, context: CallContext) -> AsyncIterator[GenerateChunk]:
        return self.staged.stream(self.chunks, request, context, endless=self.endless)

    async def tokenize(self, request: Request) -> TokenizeResult:
        await self.staged.act(request)
        return TokenizeResult((1, 2, 3))

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        await self.staged.act(model, tuple(token_ids))
        return "text"

    async def list_models(self) -> tuple[ModelCard, ...]:
        await self.staged.act()
        return (CARD,)

    async def server_info(self) -> ServerInfo:
        await self.staged.act()
        return ServerInfo("0.1.0", (CARD,), (RECORD,))


class FakeWorker:
    """A `WorkerService` and a `TransferService`."""

    def __init__(self) -> None:
        self.staged = Staged()
        self.steps: Sequence[tuple[SequenceOutput, ...]] = (
            (),
            (
                SequenceOutput(ATTEMPT, (TokenOutput(5),)),
                SequenceOutput(ATTEMPT, (TokenOutput(6), TokenOutput(7))),
            ),
            (SequenceOutput(ATTEMPT, (), FinishReason.ERROR, 16, CHUNKS[-1].phases, "lost its peer"),),
        )

    def attach(
        self, gateway_id: GatewayId, context: CallContext
    ) -> AsyncIterator[tuple[SequenceOutput, ...]]:
        return self.staged.stream(self.steps, gateway_id, context)

    async def submit(self, spec: SequenceSpec, gateway_id: GatewayId, context: CallContext) -> None:
        await self.staged.act(spec, gateway_id, context)

    async def reserve(self, spec: SequenceSpec, gateway_id: GatewayId, context: CallContext) -> Ticket:
        await self.staged.act(spec, gateway_id, context)
        return TICKET

    async def prefill(
        self, spec: SequenceSpec, ticket: Ticket, gateway_id: GatewayId, context: CallContext
    ) -> PrefillResult:
        await self.staged.act(spec, ticket, gateway_id, context)
        return PrefillResult(TokenOutput(5, -0.5), 16, CHUNKS[-1].phases)

    async def cancel(self, attempt_id: AttemptId) -> None:
        await self.staged.act(attempt_id)

    async def describe(self) -> WorkerRecord:
        await self.staged.act()
        return RECORD

    async def handshake(self, hello: Hello, context: CallContext) -> Hello:
        await self.staged.act(hello, context)
        return HELLO

    async def finish(self, word: FinalWord, context: CallContext) -> None:
        await self.staged.act(word, context)

    async def renew(self, transfer_ids: Sequence[TransferId], context: CallContext) -> tuple[TransferId, ...]:
        await self.staged.act(tuple(transfer_ids), context)
        return tuple(transfer_ids[1:])
