"""Decode and prefill speed of one engine, beside plain transformers on the same cores and weights."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from tandem.config.choices import ModelDtype, WeightFormat
from tandem.engine.engine import Engine
from tandem.engine.model_runner import ModelRunner
from tandem.engine.sampler import Sampler
from tandem.engine.settings import EngineSettings
from tandem.generation import SequenceSpec
from tandem.ids import AttemptId
from tandem.kv.storage import KvStorage
from tandem.model.load import load_model
from tandem.model.pull import ensure_model
from tandem.request import SamplingParams
from tandem.system import SystemClock

BATCHES = (1, 8, 16)
PROMPT_TOKENS = 32
PREFILL_TOKENS = 1024
STEPS = 16
ROUNDS = 3
NUM_BLOCKS = 400
Speed = Callable[[], float]


class Ours:
    """One engine; every run computes prompts that it has never seen."""

    def __init__(self, folder: Path, weights: WeightFormat) -> None:
        model = load_model(folder, dtype=ModelDtype.FLOAT32, weights=weights, block_size_tokens=16)
        settings = EngineSettings(
            num_blocks=NUM_BLOCKS,
            max_context_tokens=model.max_context_tokens,
            max_batch_tokens=PREFILL_TOKENS,
        )
        runner = ModelRunner(model, KvStorage(model.layout, NUM_BLOCKS))
        self._engine = Engine(settings, runner, Sampler(), SystemClock())
        self._vocab_size = model.vocab_size
        self._num_made = 0

    def _submit(self, num_tokens: int, max_tokens: int) -> None:
        self._num_made += 1
        prompt = torch.randint(10, self._vocab_size, (num_tokens,)).tolist()
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self._engine.submit(
            SequenceSpec(AttemptId(str(self._num_made)), tuple(prompt), num_tokens, sampling, 0, b"bench")
        )

    def decode(self, batch: int) -> float:
        """Tokens a second of `batch` sequences side by side."""
        for _ in range(batch):
            self._submit(PROMPT_TOKENS, STEPS + 4)
        self._engine.step()
        self._engine.step()
        start_s = time.perf_counter()
        for _ in range(STEPS):
            self._engine.step()
        speed = batch * STEPS / (time.perf_counter() - start_s)
        while not self._engine.idle:
            self._engine.step()
        return speed

    def prefill(self) -> float:
        """Prompt tokens a second."""
        self._submit(PREFILL_TOKENS, 1)
        start_s = time.perf_counter()
        while not self._engine.idle:
            self._engine.step()
        return PREFILL_TOKENS / (time.perf_counter() - start_s)


class Plain:
    """transformers with its own attention and cache, as it comes."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._vocab_size = self._model.config.vocab_size

    @torch.inference_mode()
    def decode(self, batch: int) -> float:
        """Tokens a second of `batch` sequences in one static batch."""
        out = self._model(input_ids=torch.randint(10, self._vocab_size, (batch, PROMPT_TOKENS)))
        token = out.logits[:, -1:].argmax(-1)
        start_s = time.perf_counter()
        for _ in range(STEPS):
            out = self._model(input_ids=token, cache=out.cache)
            token = out.logits[:, -1:].argmax(-1)
        return batch * STEPS / (time.perf_counter() - start_s)

    @torch.inference_mode()
    def prefill(self) -> float:
        """Prompt tokens a second."""
        prompt = torch.randint(10, self._vocab_size, (1, PREFILL_TOKENS))
        start_s = time.perf_counter()
        self._model(input_ids=prompt, logits_to_keep=1)
        return PREFILL_TOKENS / (time.perf_counter() - start_s)


def run(console: Console) -> None:
    """Measure in turns, so that a noisy machine is noisy for all; print medians and their ratios."""
    folder = ensure_model("smollm2-135m")
    plain = Plain(folder)
    full, int8 = Ours(folder, WeightFormat.FULL), Ours(folder, WeightFormat.INT8)
    table = Table(
        "", "transformers fp32", "Tandem fp32", "ratio", "Tandem int8", "ratio", title="tokens per second"
    )
    for batch in BATCHES:
        runs = [lambda who=who, batch=batch: who.decode(batch) for who in (plain, full, int8)]
        table.add_row(f"decode, batch {batch}", *_cells(runs))
    runs = [plain.prefill, full.prefill, int8.prefill]
    table.add_row(f"prefill, {PREFILL_TOKENS} tokens", *_cells(runs))
    console.print(table)


def _cells(runs: list[Speed]) -> list[str]:
    speeds: list[list[float]] = [[] for _ in runs]
    for _ in range(ROUNDS):
        for measure, seen in zip(runs, speeds, strict=True):
            seen.append(measure())
    base, *ours = (statistics.median(seen) for seen in speeds)
    cells = [f"{base:.1f}"]
    for speed in ours:
        cells += [f"{speed:.1f}", f"{speed / base:.2f}"]
    return cells


if __name__ == "__main__":
    run(Console())
