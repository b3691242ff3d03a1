"""What `transformers` itself answers, greedily: the truth that every way through Tandem must match."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

BLOCK = 16
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 47, 64, 65, 100, 127, 128, 129, 200, 333, 512, 1023, 1500, 2000)
"""Prompt lengths in tokens: block borders, chunk borders, and both ends of what is asked for."""


@cache
def _model(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@cache
def greedy_with_margin(
    folder: Path, prompt: tuple[int, ...], max_tokens: int
) -> tuple[tuple[int, ...], float]:
    """The tokens of `greedy`, and the smallest lead in logits that one of them had over the next best."""
    with torch.inference_mode():
        answer = _model(folder).generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    best = torch.cat(answer.logits).topk(2).values
    margin = float((best[:, 0] - best[:, 1]).min())
    return tuple(answer.sequences[0, len(prompt) :].tolist()), margin


def greedy(folder: Path, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """Up to `max_tokens` new tokens, an end of sequence included."""
    return greedy_with_margin(folder, prompt, max_tokens)[0]


def random_prompt(num_tokens: int, vocab_size: int, seed: int = 0) -> tuple[int, ...]:
    """Random tokens, the special ones left out; for equal seeds the shorter is a prefix of the longer."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, vocab_size, (num_tokens,), generator=generator).tolist())


def prompts(vocab_size: int, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[tuple[int, ...]]:
    """One prompt a length, no two with a common prefix."""
    return [random_prompt(length, vocab_size, seed + 1000 * at) for at, length in enumerate(lengths)]
