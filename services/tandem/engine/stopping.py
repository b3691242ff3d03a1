"""When a sequence ends by its tokens. Stop strings are text: the gateway looks for those."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tandem.generation import SequenceSpec
from tandem.request import FinishReason

_NONE: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class StopRule:
    """One sequence's rule, drawn up once.

    `token_ids` end the sequence once `min_tokens` others were generated; the token that ends it is
    part of the output. `limit_tokens` is the length, prompt included, at which it ends anyway.
    """

    token_ids: frozenset[int]
    num_prompt_tokens: int
    min_tokens: int
    limit_tokens: int

    @classmethod
    def of(cls, spec: SequenceSpec, eos_token_ids: Iterable[int], max_context_tokens: int) -> StopRule:
        """The rule that `spec` asks for. `max_tokens` None: to the end of the context."""
        sampling = spec.sampling
        eos = () if sampling.ignore_eos else eos_token_ids
        limit = max_context_tokens
        if sampling.max_tokens is not None:
            limit = min(limit, spec.num_prompt_tokens + sampling.max_tokens)
        return cls(
            token_ids=frozenset((*eos, *sampling.stop_token_ids)),
            num_prompt_tokens=spec.num_prompt_tokens,
            min_tokens=sampling.min_tokens,
            limit_tokens=limit,
        )

    def check(self, token_id: int, num_tokens: int) -> FinishReason | None:
        """Whether a sequence of `num_tokens` tokens, the last of which is `token_id`, has ended."""
        if token_id in self.token_ids and num_tokens - self.num_prompt_tokens > self.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_tokens >= self.limit_tokens else None

    def suppressed(self, num_tokens: int) -> frozenset[int]:
        """Tokens that must not be drawn as the next one of a sequence of `num_tokens` tokens."""
        return self.token_ids if num_tokens - self.num_prompt_tokens < self.min_tokens else _NONE
