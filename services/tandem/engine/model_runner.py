"""The seam between the engine's flat batches and a model: arrays in, logits out."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.engine.batch import BatchInput
from tandem.kv.storage import KvStorage
from tandem.model.attention import PagedMemory, PagedStep
from tandem.model.load import LoadedModel


class ModelRunner:
    """Runs one model over one KV storage. One thread at a time."""

    def __init__(self, model: LoadedModel, storage: KvStorage) -> None:
        self._module = model.module
        self._memory = PagedMemory(storage)

    @torch.inference_mode()
    def forward(self, batch: BatchInput) -> Tensor:
        """Write the batch's KV; float32 logits [N, vocab] of `batch.sample_rows`."""
        step = PagedStep(
            self._memory,
            slots=batch.slots,
            query_starts=batch.query_starts,
            context_lens=batch.context_lens,
            block_tables=batch.block_tables,
        )
        output = self._module(
            input_ids=torch.from_numpy(batch.token_ids)[None],
            position_ids=torch.from_numpy(batch.positions)[None],
            use_cache=False,
            logits_to_keep=torch.from_numpy(batch.sample_rows),
            paged=step,
        )
        logits: Tensor = output.logits[0]
        return logits.float()
