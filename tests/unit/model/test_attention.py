"""Paged attention against the plainest reference there is, with NaN in every slot that is nobody's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tests.support.models import tiny_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tandem.errors import InternalError, ModelLoadError
from tandem.kv.layout import KvDtype, KvLayout
from tandem.kv.storage import KvStorage
from tandem.model.attention import PagedMemory, PagedStep, paged_attention, register, require_supported

NUM_LAYERS = 2
HEAD_DIM = 8


@dataclass(frozen=True)
class Shape:
    """What a model decides."""

    kv_heads: int = 2
    per_kv_head: int = 2
    block: int = 4
    window: int | None = None
    softcap: float | None = None
    scaling: float | None = None
    dtype: KvDtype = KvDtype.FLOAT32


def reference(query: Tensor, keys: Tensor, values: Tensor, shape: Shape) -> Tensor:
    """[n, heads, dim] of the last n positions of one sequence, by query and head, in float64."""
    query, keys, values = query.double(), keys.double(), values.double()
    num_queries, num_heads, head_dim = query.shape
    scaling = head_dim**-0.5 if shape.scaling is None else shape.scaling
    out = torch.empty_like(query)
    for row in range(num_queries):
        end = len(keys) - num_queries + row + 1
        start = 0 if shape.window is None else max(0, end - shape.window)
        for head in range(num_heads):
            kv_head = head // shape.per_kv_head
            scores = keys[start:end, kv_head] @ query[row, head] * scaling
            if shape.softcap is not None:
                scores = torch.tanh(scores / shape.softcap) * shape.softcap
            out[row, head] = torch.softmax(scores, 0) @ values[start:end, kv_head]
    return out


def check(
    shape: Shape, sequences: Sequence[tuple[int, int]], seed: int = 0, *, stale: float = math.nan
) -> None:
    """One step over `sequences` of (tokens before the step, tokens in it) equals the reference.

    Blocks lie anywhere. All slots that hold no token of a sequence hold `stale`, so does block 0, with
    which tables are padded.
    """
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    contexts = [past + new for past, new in sequences]
    counts = [-(-context // shape.block) for context in contexts]
    layout = KvLayout("rev", NUM_LAYERS, shape.kv_heads, HEAD_DIM, shape.dtype, shape.block)
    storage = KvStorage(layout, sum(counts) + 3)
    storage.tensor.fill_(stale)
    free = iter(random.permutation(np.arange(1, storage.num_blocks)).tolist())
    tables = np.zeros((len(sequences), max(counts)), np.int32)
    places: list[tuple[Tensor, Tensor]] = []
    for sequence, context in enumerate(contexts):
        tables[sequence, : counts[sequence]] = [next(free) for _ in range(counts[sequence])]
        block, offset = np.divmod(np.arange(context), shape.block)
        places.append((torch.from_numpy(tables[sequence][block].astype(np.int64)), torch.from_numpy(offset)))
    dtype = storage.tensor.dtype
    kv = [torch.randn(NUM_LAYERS, 2, context, shape.kv_heads, HEAD_DIM).to(dtype) for context in contexts]
    for (past, _), (blocks, offsets), content in zip(sequences, places, kv, strict=True):
        for layer in range(NUM_LAYERS):
            for which in (0, 1):
                storage.tensor[blocks[:past], layer, which, offsets[:past]] = content[layer, which, :past]
    step = PagedStep(
        PagedMemory(storage),
        slots=np.concatenate(
            [
                (blocks * shape.block + offsets)[past:].numpy()
                for (past, _), (blocks, offsets) in zip(sequences, places, strict=True)
            ]
        ),
        query_starts=np.cumsum([0] + [new for _, new in sequences], dtype=np.int32),
        context_lens=np.array(contexts, np.int32),
        block_tables=tables,
    )
    num_tokens = sum(new for _, new in sequences)
    for layer in range(NUM_LAYERS):
        query = torch.randn(num_tokens, shape.kv_heads * shape.per_kv_head, HEAD_DIM).to(dtype)
        key, value = (
            torch.cat(
                [content[layer, which, past:] for (past, _), content in zip(sequences, kv, strict=True)]
            )
            for which in (0, 1)
        )
        step.write(layer, key, value)
        out = step.attend(layer, query, shape.scaling, shape.window, shape.softcap)
        assert out.shape == query.shape
        assert out.dtype == dtype
        row = 0
        for (_, new), content in zip(sequences, kv, strict=True):
            expected = reference(query[row : row + new], content[layer, 0], content[layer, 1], shape)
            rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (3e-2, 3e-2)
            torch.testing.assert_close(out[row : row + new].double(), expected, rtol=rtol, atol=atol)
            row += new
    for (blocks, offsets), content in zip(places, kv, strict=True):  # all is where it belongs
        for layer in range(NUM_LAYERS):
            for which in (0, 1):
                assert torch.equal(storage.tensor[blocks, layer, which, offsets], content[layer, which])
    owned = torch.zeros(storage.num_blocks, shape.block, dtype=torch.bool)
    for blocks, offsets in places:
        owned[blocks, offsets] = True
    others = storage.tensor.permute(0, 3, 1, 2, 4, 5)[~owned]
    assert bool(others.isnan().all() if math.isnan(stale) else (others == stale).all())  # nothing elsewhere


BATCHES = {
    "one token": [(0, 1)],
    "one decode": [(9, 1)],
    "whole prompt": [(0, 11)],
    "whole prompt to a border": [(0, 12)],
    "chunk from a border": [(8, 7)],
    "chunk from amid a block": [(6, 7)],
    "chunk within a block": [(5, 2)],
    "chunk after a long past": [(61, 3)],
    "decodes of one length": [(9, 1), (9, 1), (9, 1)],
    "decodes of all lengths": [(n, 1) for n in (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 40, 63, 64)],
    "decodes, the longest first": [(31, 1), (4, 1), (16, 1), (17, 1)],
    "two prompts": [(0, 5), (0, 9)],
    "two chunks alike": [(3, 5), (3, 5)],
    "all at once": [(0, 6), (12, 1), (5, 6), (0, 1), (33, 1), (9, 1), (2, 13)],
}
SHAPES = {
    "plain": Shape(per_kv_head=1),
    "one key head": Shape(kv_heads=1, per_kv_head=4),
    "groups of three": Shape(kv_heads=2, per_kv_head=3),
    "window": Shape(window=5),
    "window of one": Shape(window=1),
    "window wider than all": Shape(window=1000),
    "softcap": Shape(softcap=2.0),
    "softcap and window": Shape(softcap=2.0, window=5, scaling=0.3),
    "scaling": Shape(scaling=0.9),
    "large blocks": Shape(block=16),
    "blocks of one": Shape(block=1),
    "bfloat16": Shape(block=16, dtype=KvDtype.BFLOAT16),
    "bfloat16 softcap": Shape(softcap=2.0, window=5, dtype=KvDtype.BFLOAT16),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_attention_is_the_reference_and_nan_elsewhere_does_not_leak(shape, batch):
    check(shape, batch)


@pytest.mark.parametrize("seed", range(60))
def test_random_batches_of_random_shapes(seed):
    random = np.random.default_rng(1000 + seed)
    softcap = random.choice([None, None, 3.0])
    shape = Shape(
        kv_heads=int(random.integers(1, 4)),
        per_kv_head=int(random.integers(1, 5)),
        block=int(random.choice([1, 3, 4, 16])),
        window=random.choice([None, 1, 3, 17, 500]),
        softcap=softcap,
    )
    batch = [
        (int(random.integers(0, 70)), 1 if random.random() < 0.6 else int(random.integers(1, 20)))
        for _ in range(random.integers(1, 12))
    ]
    check(shape, batch, seed, stale=random.choice([math.nan, math.inf, -math.inf, 1e30]))


def test_a_prompt_in_chunks_is_the_prompt_at_once():
    """A sequence's later chunks see what its earlier ones wrote."""
    layout = KvLayout("rev", 1, 2, HEAD_DIM, KvDtype.FLOAT32, 4)
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 30, 2, HEAD_DIM)
    table = np.array([[3, 9, 1, 7, 2, 8, 4, 6]], np.int32)

    def run(*borders: int) -> Tensor:
        storage = KvStorage(layout, 10)
        outputs = []
        for start, end in zip((0, *borders), (*borders, 30), strict=True):
            at = np.arange(start, end)
            step = PagedStep(
                PagedMemory(storage),
                slots=table[0, at // 4].astype(np.int64) * 4 + at % 4,
                query_starts=np.array([0, end - start], np.int32),
                context_lens=np.array([end], np.int32),
                block_tables=table,
            )
            step.write(0, key[start:end], value[start:end])
            outputs.append(step.attend(0, query[start:end], None, None, None))
        return torch.cat(outputs)

    whole = run()
    for borders in ((16,), (1, 2, 3), (7, 8, 29)):
        torch.testing.assert_close(run(*borders), whole)


# What transformers calls


class Layer(nn.Module):
    layer_idx = 0


def test_a_model_that_does_not_pass_the_step_on_can_not_be_served():
    tensor = torch.zeros(1, 1, 1, HEAD_DIM)
    with pytest.raises(InternalError, match="Layer did not pass on the step"):
        paged_attention(Layer(), tensor, tensor, tensor, None)


def test_an_attention_with_an_unknown_part_is_refused_rather_than_wrong():
    tensor = torch.zeros(1, 1, 1, HEAD_DIM)
    storage = KvStorage(KvLayout("rev", 1, 1, HEAD_DIM, KvDtype.FLOAT32, 4), 1)
    step = PagedStep(
        PagedMemory(storage),
        slots=np.array([0], np.int64),
        query_starts=np.array([0, 1], np.int32),
        context_lens=np.array([1], np.int32),
        block_tables=np.array([[0]], np.int32),
    )
    with pytest.raises(ModelLoadError, match="Layer needs s_aux in attention"):
        paged_attention(Layer(), tensor, tensor, tensor, None, paged=step, s_aux=tensor)
    out, weights = paged_attention(
        Layer(), tensor, tensor, tensor, None, paged=step, s_aux=None, use_cache=False
    )
    assert out.shape == (1, 1, 1, HEAD_DIM)
    assert weights is None


def test_a_model_without_attention_in_every_layer_is_refused():
    register()
    module = AutoModelForCausalLM.from_pretrained(tiny_model())
    layout = KvLayout("rev", 3, 2, 16, KvDtype.FLOAT32, 16)
    require_supported(module, layout)
    del module.model.layers[1]
    with pytest.raises(ModelLoadError, match="not every layer has plain attention; supported are"):
        require_supported(module, layout)
