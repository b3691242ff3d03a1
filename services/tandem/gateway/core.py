"""The gateway: what users call. Validates, tokenises, dispatches, and puts the answer into text."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

import tandem
from tandem.clock import Clock
from tandem.directory.base import Directory
from tandem.errors import DeadlineExceeded, InvalidRequest
from tandem.gateway.answer import Answer
from tandem.gateway.dispatch import Dispatcher, Job
from tandem.gateway.merge import merge
from tandem.gateway.observation import Observation
from tandem.gateway.prompt import Prompt, PromptReader, ServedModel
from tandem.gateway.text import TextAssembler
from tandem.generation import CallContext, Phase
from tandem.ids import IdSource
from tandem.request import Request, Usage
from tandem.routing.admission import Admission
from tandem.rpc.services import GenerateChunk, ModelCard, ServerInfo, TokenizeResult
from tandem.telemetry import names
from tandem.telemetry.metrics import GatewayMetrics
from tandem.telemetry.spans import Tracer

_SEED_BITS = 63


class GatewayCore:
    """Implements `InferenceService`. All methods on one event loop."""

    def __init__(
        self,
        model: ServedModel,
        reader: PromptReader,
        dispatcher: Dispatcher,
        directory: Directory,
        admission: Admission,
        *,
        clock: Clock,
        ids: IdSource,
        tracer: Tracer,
        metrics: GatewayMetrics | None = None,
    ) -> None:
        self.admission = admission
        self._model = model
        self._reader = reader
        self._dispatcher = dispatcher
        self._directory = directory
        self._clock = clock
        self._ids = ids
        self._tracer = tracer
        self._metrics = metrics

    async def generate(self, request: Request, context: CallContext) -> AsyncGenerator[GenerateChunk]:
        """See `InferenceService`."""
        observation = Observation(
            request,
            context,
            self._model.card.model_id,
            clock=self._clock,
            tracer=self._tracer,
            metrics=self._metrics,
        )
        try:
            with self.admission.admit():
                async with aclosing(self._answer(request, context, observation)) as chunks:
                    async for chunk in chunks:
                        yield chunk
        except BaseException as error:
            observation.finish(error)
            raise

    async def tokenize(self, request: Request) -> TokenizeResult:
        """See `InferenceService`."""
        return TokenizeResult(await self._reader.token_ids(request))

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        """See `InferenceService`."""
        self._model.require(model)
        for token_id in token_ids:
            if not 0 <= token_id < self._model.card.vocab_size:
                raise InvalidRequest(
                    "token_ids", f"token id {token_id} is outside 0 to {self._model.card.vocab_size - 1}"
                )
        return self._model.tokenizer.decode(token_ids)

    async def list_models(self) -> tuple[ModelCard, ...]:
        """See `InferenceService`."""
        return (self._model.card,)

    async def server_info(self) -> ServerInfo:
        """See `InferenceService`."""
        return ServerInfo(tandem.__version__, (self._model.card,), self._directory.membership.workers())

    async def _answer(
        self, request: Request, context: CallContext, observation: Observation
    ) -> AsyncGenerator[GenerateChunk]:
        """All chunks of an admitted request; ends the observation before the last one goes out."""
        self._reader.validate(request)
        if context.deadline is not None and context.deadline.passed(self._clock):
            raise DeadlineExceeded("the deadline had passed when the request came in; allow more time")
        with observation.phase(Phase.TOKENISE) as attributes:
            prompt = await self._reader.read(request)
            attributes[names.NUM_TOKENS] = len(prompt.token_ids)
        observation.usage = Usage(prompt_tokens=len(prompt.token_ids))
        answers = self._answers(request, prompt, context, observation)
        num_open = len(answers)
        async with aclosing(merge([answer.chunks(self._dispatcher) for answer in answers])) as chunks:
            async for chunk in chunks:
                observation.usage = _usage(prompt, answers)
                num_open -= chunk.finish is not None
                if num_open:
                    yield chunk
                    continue
                observation.finish()
                yield replace(
                    chunk,
                    usage=observation.usage,
                    phases=tuple(observation.phases),
                    request_id=request.request_id,
                    trace_id=observation.trace_id,
                )

    def _answers(
        self, request: Request, prompt: Prompt, context: CallContext, observation: Observation
    ) -> list[Answer]:
        """One per choice, each with a seed of its own; a given seed is the first choice's."""
        sampling = request.sampling
        seed = sampling.seed if sampling.seed is not None else int(self._ids.hex128(), 16)
        ends = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ends |= self._model.eos_token_ids
        answers = []
        for index in range(sampling.n):
            job = Job(
                prompt=prompt,
                sampling=sampling,
                seed=(seed + index) % (1 << _SEED_BITS),
                context=CallContext(context.deadline, observation.trace_headers),
                priority=request.priority,
                session_id=request.session_id,
            )
            text = TextAssembler(
                self._model.tokenizer.detokenizer(prompt.token_ids),
                sampling.stop,
                sampling.min_tokens,
                ends,
            )
            answers.append(Answer(index, job, text, observation))
        return answers


def _usage(prompt: Prompt, answers: Sequence[Answer]) -> Usage:
    """The prompt counts once, however many choices; so do its cached tokens, at their most."""
    return Usage(
        prompt_tokens=len(prompt.token_ids),
        cached_tokens=max(answer.num_cached_tokens or 0 for answer in answers),
        completion_tokens=sum(answer.num_tokens for answer in answers),
    )
