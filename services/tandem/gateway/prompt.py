"""From a request's input to token ids and block hashes, off the event loop."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from tandem.errors import InvalidRequest, UnknownModel
from tandem.ids import BlockHash
from tandem.kv.hashing import chain_root, hash_blocks, tenant_salt
from tandem.model.tokenizer import Tokenizer
from tandem.request import (
    ModelLimits,
    Request,
    validate_input,
    validate_prompt_tokens,
    validate_sampling,
)
from tandem.rpc.services import ModelCard


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt ready to route. `hashes` name its full blocks, in order."""

    token_ids: tuple[int, ...]
    chain_root: bytes
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """All that a gateway knows of the model it serves; nothing here needs its weights."""

    card: ModelCard
    tokenizer: Tokenizer
    layout_fingerprint: str
    block_size_tokens: int
    block_bytes: int
    eos_token_ids: frozenset[int]

    @property
    def limits(self) -> ModelLimits:
        """What the validator needs."""
        return ModelLimits(self.card.vocab_size, self.card.max_context_tokens)

    def require(self, name: str) -> None:
        """Raise `UnknownModel` unless this model, or none, was named."""
        if name not in ("", self.card.model_id):
            raise UnknownModel(f"model {name!r} is not served here; use {self.card.model_id!r}")


class PromptReader:
    """Validates and tokenises. The heavy part runs in threads; safe for concurrent use."""

    def __init__(self, model: ServedModel, *, max_prompt_bytes: int, tenant_secret: bytes) -> None:
        self._model = model
        self._max_prompt_bytes = max_prompt_bytes
        self._tenant_secret = tenant_secret

    def validate(self, request: Request) -> None:
        """Everything that can be checked before tokenising. Raises `InvalidRequest`, `UnknownModel`."""
        self._model.require(request.model)
        validate_input(request, max_prompt_bytes=self._max_prompt_bytes)
        validate_sampling(request.sampling, self._model.limits)

    async def read(self, request: Request) -> Prompt:
        """Tokenise and hash a validated request. Raises `InvalidRequest`."""
        return await asyncio.to_thread(self._read, request)

    async def token_ids(self, request: Request) -> tuple[int, ...]:
        """Only the ids, for `Tokenize`. Raises as `validate` and `read`."""
        self._model.require(request.model)
        validate_input(request, max_prompt_bytes=self._max_prompt_bytes)
        return await asyncio.to_thread(self._tokenise, request)

    def _read(self, request: Request) -> Prompt:
        token_ids = self._tokenise(request)
        validate_prompt_tokens(token_ids, self._model.limits, request.sampling)
        salt = b"" if request.public_prefix else tenant_salt(self._tenant_secret, request.tenant)
        root = chain_root(self._model.layout_fingerprint, salt=salt)
        return Prompt(token_ids, root, tuple(hash_blocks(root, token_ids, self._model.block_size_tokens)))

    def _tokenise(self, request: Request) -> tuple[int, ...]:
        tokenizer = self._model.tokenizer
        if request.token_ids is not None:
            return request.token_ids
        if request.messages is not None:
            return tuple(tokenizer.encode_chat(request.messages))
        if request.prompt is not None:
            return tuple(tokenizer.encode(request.prompt))
        raise InvalidRequest("input", "give exactly one of prompt, messages, token_ids; got none")
