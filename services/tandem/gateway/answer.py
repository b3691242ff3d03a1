"""One choice's outputs made into what its client reads: text, kept tokens, and one finish."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from tandem.errors import InternalError
from tandem.gateway.dispatch import Dispatcher, Job
from tandem.gateway.observation import Observation
from tandem.gateway.text import TextAssembler
from tandem.generation import SequenceOutput
from tandem.request import FinishReason
from tandem.rpc.services import GenerateChunk


class Answer:
    """Reads one job to its end. Mutable: counts what the client was given."""

    def __init__(self, index: int, job: Job, text: TextAssembler, observation: Observation) -> None:
        self.num_tokens = 0
        self.num_cached_tokens: int | None = None
        """Prompt tokens that needed no computing; None before the first token."""
        self._index = index
        self._job = job
        self._text = text
        self._observation = observation

    async def chunks(self, dispatcher: Dispatcher) -> AsyncGenerator[GenerateChunk]:
        """The choice's chunks; the last one has `finish`. Raises what the dispatcher raises."""
        last: GenerateChunk | None = None
        async with aclosing(dispatcher.run(self._job)) as outputs:
            async for output in outputs:
                self._observation.add_phases(output.phases)
                if self._job.stop_early:
                    continue  # the text has ended; what still comes is phases
                chunk = self._chunk(output)
                if chunk.finish is not None:
                    last = chunk  # its phases are noted; the dispatcher's clean-up comes first
                    continue
                if chunk.tokens:
                    yield chunk
                if self._job.stop_early:
                    last = GenerateChunk(self._index, finish=FinishReason.STOP)
        if last is None:
            raise InternalError("a sequence ended without a finish reason; please report it")
        self._observation.add_finish(last.finish or FinishReason.STOP)
        yield last

    def _chunk(self, output: SequenceOutput) -> GenerateChunk:
        """The client's share of one output. Sets `stop_early` on a stop string amid the sequence."""
        delta = self._text.push(output.tokens)
        tokens = output.tokens[: delta.num_tokens_kept]
        if tokens and self.num_cached_tokens is None:
            self.num_cached_tokens = output.num_cached_tokens
        self.num_tokens += len(tokens)
        self._observation.add_tokens(len(tokens))
        if output.finish is None:
            self._job.stop_early = delta.stopped
            return GenerateChunk(self._index, delta.text, tokens)
        text = delta.text + self._text.finish()
        return GenerateChunk(self._index, text, tokens, FinishReason.STOP if delta.stopped else output.finish)
