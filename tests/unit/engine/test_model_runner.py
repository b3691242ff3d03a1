"""Flat batches through paged KV against transformers' own forward of each sequence alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.models import VOCAB_SIZE, Tiny, tiny_model
from tests.support.reference import random_prompt
from torch import Tensor
from transformers import AutoModelForCausalLM

from tandem.config.choices import ModelDtype, WeightFormat
from tandem.engine.batch import BatchInput
from tandem.engine.model_runner import ModelRunner
from tandem.kv.storage import KvStorage
from tandem.model.load import LoadedModel, load_model

BLOCK = 16
NUM_BLOCKS = 64
FAMILIES = pytest.mark.parametrize("kind", Tiny, ids=lambda kind: kind.value)


@cache
def loaded(kind: Tiny, dtype: ModelDtype = ModelDtype.FLOAT32) -> LoadedModel:
    return load_model(tiny_model(kind), dtype=dtype, weights=WeightFormat.FULL, block_size_tokens=BLOCK)


@cache
def theirs(folder: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def truth(kind: Tiny, tokens: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits [n, vocab] after each token."""
    with torch.inference_mode():
        return theirs(tiny_model(kind), dtype)(torch.tensor([tokens])).logits[0].float()


class Sequences:
    """Some token sequences, each with blocks of its own in one storage, read by a runner step by step."""

    def __init__(self, model: LoadedModel, *tokens: Sequence[int]) -> None:
        self.tokens = tokens
        storage = KvStorage(model.layout, NUM_BLOCKS)
        storage.tensor.fill_(float("nan"))
        self._runner = ModelRunner(model, storage)
        free = iter(np.random.default_rng(0).permutation(np.arange(1, NUM_BLOCKS)).tolist())
        self._blocks = [[next(free) for _ in range(-(-len(part) // BLOCK))] for part in tokens]

    def step(self, spans: dict[int, tuple[int, int]], sampled: Sequence[int]) -> Tensor:
        """Compute positions [start, end) of sequences; logits of the flat rows `sampled`."""
        at = [(sequence, np.arange(start, end)) for sequence, (start, end) in spans.items()]
        width = max(len(self._blocks[sequence]) for sequence in spans)
        tables = [self._blocks[sequence] for sequence in spans]
        batch = BatchInput(
            token_ids=np.concatenate([np.array(self.tokens[s], np.int64)[rows] for s, rows in at]),
            positions=np.concatenate([rows for _, rows in at]),
            slots=np.concatenate(
                [np.array(self._blocks[s])[rows // BLOCK] * BLOCK + rows % BLOCK for s, rows in at]
            ),
            query_starts=np.cumsum([0] + [len(rows) for _, rows in at], dtype=np.int32),
            context_lens=np.array([end for _, end in spans.values()], np.int32),
            block_tables=np.array([table + [0] * (width - len(table)) for table in tables], np.int32),
            sample_rows=np.array(sampled, np.int64),
        )
        return self._runner.forward(batch)


def close(logits: Tensor, expected: Tensor, tolerance: float = 1e-3) -> None:
    """Logits of these models reach tens; rounding in float32 stays far below."""
    torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance)


@FAMILIES
def test_every_logit_of_a_prompt_is_transformers(kind):
    tokens = random_prompt(150, VOCAB_SIZE)
    logits = Sequences(loaded(kind), tokens).step({0: (0, 150)}, range(150))
    assert logits.shape == (150, VOCAB_SIZE)
    assert logits.dtype == torch.float32
    close(logits, truth(kind, tokens))


@FAMILIES
def test_chunks_and_decodes_of_many_sequences_in_one_batch_are_each_alone(kind):
    """Past the sliding windows of 64 and 96, with borders amid blocks."""
    tokens = [random_prompt(length, VOCAB_SIZE, seed) for seed, length in enumerate((150, 40, 33, 120, 1))]
    expected = [truth(kind, part) for part in tokens]
    sequences = Sequences(loaded(kind), *tokens)
    first = sequences.step({0: (0, 70), 1: (0, 39), 2: (0, 32)}, [69, 108, 140])
    close(first, torch.stack([expected[0][69], expected[1][38], expected[2][31]]))
    second = sequences.step(
        {1: (39, 40), 0: (70, 149), 3: (0, 119), 2: (32, 33), 4: (0, 1)}, [0, 79, 198, 199, 200]
    )
    close(
        second,
        torch.stack([expected[1][39], expected[0][148], expected[3][118], expected[2][32], expected[4][0]]),
    )
    third = sequences.step({3: (119, 120), 0: (149, 150)}, [0, 1])
    close(third, torch.stack([expected[3][119], expected[0][149]]))


@FAMILIES
def test_token_by_token_is_the_prompt_at_once(kind):
    tokens = random_prompt(40, VOCAB_SIZE)
    sequences = Sequences(loaded(kind), tokens)
    rows = [sequences.step({0: (at, at + 1)}, [0]) for at in range(40)]
    close(torch.cat(rows), truth(kind, tokens))


@pytest.mark.parametrize("kind", [Tiny.LLAMA, Tiny.GEMMA2], ids=lambda kind: kind.value)
def test_bfloat16_gives_what_bfloat16_can(kind):
    tokens = [random_prompt(length, VOCAB_SIZE, seed) for seed, length in enumerate((80, 33))]
    model = loaded(kind, ModelDtype.BFLOAT16)
    sequences = Sequences(model, *tokens)
    sequences.step({0: (0, 79), 1: (0, 32)}, [])
    logits = sequences.step({0: (79, 80), 1: (32, 33)}, [0, 1])
    assert logits.dtype == torch.float32
    for row, part in enumerate(tokens):
        exact, rounded = (truth(kind, part, dtype)[-1] for dtype in (torch.float32, torch.bfloat16))
        ours, usual = ((other - exact).square().mean().sqrt() for other in (logits[row], rounded))
        assert ours < 1.5 * usual + 0.02  # no worse than transformers in the same type
        assert usual < 0.2 * exact.std()  # which is close to the truth, so the bound says something


def test_a_step_that_samples_nothing_has_no_logits():
    tokens = random_prompt(30, VOCAB_SIZE)
    sequences = Sequences(loaded(Tiny.LLAMA), tokens)
    logits = sequences.step({0: (0, 29)}, [])
    assert logits.shape == (0, VOCAB_SIZE)
    assert logits.dtype == torch.float32
    close(sequences.step({0: (29, 30)}, [0])[0], truth(Tiny.LLAMA, tokens)[-1])  # yet its KV is written


def test_logits_come_in_the_order_of_their_rows():
    tokens = random_prompt(30, VOCAB_SIZE)
    expected = truth(Tiny.LLAMA, tokens)
    logits = Sequences(loaded(Tiny.LLAMA), tokens).step({0: (0, 30)}, [0, 7, 29])
    close(logits, expected[[0, 7, 29]])
