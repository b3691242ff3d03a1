"""How large one engine is."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.errors import ConfigError
from tandem.kv.layout import DEFAULT_BLOCK_SIZE_TOKENS


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Sizes and limits; raises `ConfigError` naming the first that makes no sense.

    `max_context_tokens` and `eos_token_ids` come from the model. `max_batch_tokens` bounds the
    tokens of one step, and so how long a prompt's chunk may delay the others' next token.
    `max_num_sequences` bounds the sequences that compute or are reserved, `max_waiting` those that
    queue behind them.
    """

    num_blocks: int
    max_context_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    block_size_tokens: int = DEFAULT_BLOCK_SIZE_TOKENS
    max_batch_tokens: int = 512
    max_num_sequences: int = 64
    max_waiting: int = 256

    def __post_init__(self) -> None:
        for name in (
            "num_blocks",
            "max_context_tokens",
            "block_size_tokens",
            "max_batch_tokens",
            "max_num_sequences",
            "max_waiting",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"engine.{name} must be at least 1, not {getattr(self, name)}")
        if self.max_batch_tokens < self.max_num_sequences:
            raise ConfigError(
                f"engine.max_batch_tokens ({self.max_batch_tokens}) must be at least "
                f"engine.max_num_sequences ({self.max_num_sequences}): a step gives every running "
                "sequence one token"
            )

    @property
    def limit_tokens(self) -> int:
        """The longest sequence: what the model takes and the pool holds (a last token needs no KV)."""
        return min(self.max_context_tokens, self.num_blocks * self.block_size_tokens + 1)
