"""A model's weights in memory, ready to run on paged KV. The definition comes from transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from tandem.config.choices import ModelDtype, WeightFormat
from tandem.errors import ModelLoadError
from tandem.kv.layout import KvDtype, KvLayout
from tandem.model.attention import PAGED, register, require_supported
from tandem.model.card import ModelFiles
from tandem.model.lean import make_lean
from tandem.model.linear import pack_linears

_TORCH_DTYPES = {ModelDtype.FLOAT32: torch.float32, ModelDtype.BFLOAT16: torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A module in evaluation mode, whose attention is `attention.paged_attention`."""

    module: nn.Module
    layout: KvLayout
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int]


def load_model(
    folder: Path,
    *,
    dtype: ModelDtype,
    weights: WeightFormat,
    block_size_tokens: int,
    num_threads: int | None = None,
) -> LoadedModel:
    """Load a Hugging Face folder onto the CPU. Blocks for seconds; raises `ModelLoadError`.

    `num_threads` bounds torch's threads, for the whole process.
    """
    files = ModelFiles.read(folder)
    layout = files.layout(KvDtype(dtype.value), weights, block_size_tokens)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    register()
    transformers_logging.disable_progress_bar()  # a second long; several workers would draw over each other
    try:
        module = AutoModelForCausalLM.from_pretrained(
            files.folder, dtype=_TORCH_DTYPES[dtype], attn_implementation=PAGED, local_files_only=True
        )
    except Exception as error:  # the library raises whatever its parts raise
        raise ModelLoadError(
            f"{folder.name}: transformers can't load this {files.architecture}: {error}"
        ) from error
    require_supported(module, layout)
    module.eval().requires_grad_(False)
    make_lean(module, weights)
    pack_linears(module, weights)
    return LoadedModel(module, layout, files.max_context_tokens, files.vocab_size, files.eos_token_ids)
