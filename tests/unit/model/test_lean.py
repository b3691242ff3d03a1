"""Lean layers against the transformers layers that they stand for, in steps of every kind."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.support.models import VOCAB_SIZE, Tiny, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM

from tandem.config.choices import ModelDtype, WeightFormat
from tandem.engine.batch import BatchInput
from tandem.engine.model_runner import ModelRunner
from tandem.kv.storage import KvStorage
from tandem.model.lean import LeanLayer
from tandem.model.linear import Int8Linear, PackedLinear, make_linear
from tandem.model.load import load_model

LEAN = (Tiny.LLAMA, Tiny.QWEN3, Tiny.MISTRAL)


def load(kind: Tiny, weights: WeightFormat = WeightFormat.FULL):
    return load_model(tiny_model(kind), dtype=ModelDtype.FLOAT32, weights=weights, block_size_tokens=16)


TOKENS = np.random.default_rng(0).integers(3, VOCAB_SIZE, (3, 128))


def step(num_done: int, num_new: int) -> BatchInput:
    """Three sequences, `num_done` tokens of each computed, that compute `num_new` more each."""
    positions = np.tile(np.arange(num_done, num_done + num_new), 3)
    tables = np.arange(24, dtype=np.int32).reshape(3, 8)
    owners = np.repeat(np.arange(3), num_new)
    return BatchInput(
        token_ids=TOKENS[:, num_done : num_done + num_new].reshape(-1),
        positions=positions,
        slots=tables[owners, positions // 16].astype(np.int64) * 16 + positions % 16,
        query_starts=np.arange(4, dtype=np.int32) * num_new,
        context_lens=np.full(3, num_done + num_new, dtype=np.int32),
        block_tables=tables,
        sample_rows=(np.arange(3) + 1) * num_new - 1,
    )


@pytest.mark.parametrize("kind", LEAN, ids=lambda kind: kind.value)
def test_known_layers_are_replaced_and_say_the_same(kind):
    model = load(kind)
    assert sum(isinstance(part, LeanLayer) for part in model.module.modules()) == 3
    runner = ModelRunner(model, KvStorage(model.layout, 24))
    plain = AutoModelForCausalLM.from_pretrained(tiny_model(kind)).eval()
    runner.forward(step(0, 100))
    logits = runner.forward(step(100, 1))  # the compiled way
    with torch.inference_mode():
        truth = plain(input_ids=torch.from_numpy(TOKENS[:, :101])).logits[:, -1]
    torch.testing.assert_close(logits, truth, rtol=1e-3, atol=1e-3)


def test_the_compiled_and_the_plain_way_through_a_layer_agree():
    model = load(Tiny.LLAMA)
    logits = []
    for compiled in (True, False):
        for part in model.module.modules():
            if isinstance(part, LeanLayer) and not compiled:
                part._one_each = None
        runner = ModelRunner(model, KvStorage(model.layout, 24))
        runner.forward(step(0, 40))
        logits.append(runner.forward(step(40, 1)))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [Tiny.GEMMA, Tiny.GEMMA2, Tiny.GEMMA3], ids=lambda kind: kind.value)
def test_other_layers_stay_and_only_their_products_are_packed(kind):
    model = load(kind)
    assert not any(isinstance(part, LeanLayer) for part in model.module.modules())
    assert any(isinstance(part, PackedLinear) for part in model.module.modules())


@pytest.mark.parametrize("weights", WeightFormat, ids=lambda weights: weights.value)
@pytest.mark.parametrize("num_rows", [1, 8, 300])
def test_layers_side_by_side_are_the_layers_one_by_one(weights, num_rows):
    torch.manual_seed(0)
    layers = [nn.Linear(64, 32), nn.Linear(64, 16, bias=False), nn.Linear(64, 48)]
    scale, x = torch.rand(64) + 0.5, torch.randn(num_rows, 64)
    packed = make_linear(layers, weights, input_scale=scale)
    truth = torch.cat([layer(x * scale) for layer in layers], dim=-1).detach()
    residual = torch.randn_like(truth)
    near = 1e-5 if weights is WeightFormat.FULL else 0.03  # of the largest, with 7 bits
    assert (packed(x) - truth).abs().max() < near * truth.abs().max()
    assert (packed.add(x, residual) - (residual + truth)).abs().max() < near * truth.abs().max() + 1e-6


def test_an_int8_row_depends_on_itself_alone_and_zeros_stay_finite():
    torch.manual_seed(0)
    packed = Int8Linear(torch.randn(32, 64), None)
    x = torch.randn(8, 64)
    x[0] *= 1e4
    x[1] = 0
    together = packed(x)
    for row in range(8):
        assert torch.equal(together[row], packed(x[row : row + 1])[0])
    assert not together[1].any()


def test_int8_answers_are_near_full_ones():
    full, small = load(Tiny.LLAMA), load(Tiny.LLAMA, WeightFormat.INT8)
    assert full.layout.fingerprint != small.layout.fingerprint
    logits = [ModelRunner(m, KvStorage(m.layout, 24)).forward(step(0, 60)) for m in (full, small)]
    likeness = torch.nn.functional.cosine_similarity(*logits, dim=-1)
    assert (likeness > 0.98).all(), likeness
