"""Tiny random models, as Hugging Face folders. Made once a session; the same bytes every time."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from enum import Enum
from functools import cache
from pathlib import Path

import torch
from tests.support.tokenizers import byte_level, save
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
)

VOCAB_SIZE = 512
MAX_CONTEXT_TOKENS = 4096


class Tiny(Enum):
    """The families that exactness is tested with."""

    LLAMA = "llama"
    QWEN3 = "qwen3"
    GEMMA = "gemma"
    GEMMA2 = "gemma2"
    GEMMA3 = "gemma3"
    MISTRAL = "mistral"


def _config(kind: Tiny) -> PreTrainedConfig:
    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": MAX_CONTEXT_TOKENS,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    gemma = {"tie_word_embeddings": False}  # tied, it would repeat its last token for ever
    match kind:
        case Tiny.LLAMA:
            return LlamaConfig(**common)
        case Tiny.QWEN3:
            return Qwen3Config(**common)
        case Tiny.GEMMA:
            return GemmaConfig(**common, **gemma)
        case Tiny.GEMMA2:
            return Gemma2Config(**common, **gemma, sliding_window=64, query_pre_attn_scalar=16)
        case Tiny.GEMMA3:
            return Gemma3TextConfig(**common, **gemma, sliding_window=64, query_pre_attn_scalar=16)
        case Tiny.MISTRAL:
            return MistralConfig(**common, sliding_window=96)


@cache
def tiny_model(kind: Tiny = Tiny.LLAMA, seed: int = 0) -> Path:
    """A folder with weights and configuration, and tests/support's byte-level tokenizer."""
    folder = Path(tempfile.mkdtemp(prefix=f"tandem-tiny-{kind.value}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(_config(kind), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                # Wide enough that the two best tokens are far apart: rounding never decides.
                parameter.normal_(0.0, 1.0 if "embed" in name else 2.0 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return save(byte_level(), folder)
