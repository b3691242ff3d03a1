"""Drawing the next token of every row of a batch, the same on whichever worker it happens.

A draw depends on its row's logits, parameters, seed and position, and on nothing else: one uniform
number comes from (seed, position) by a counter-based generator (SplitMix64's mixer, Steele et al.
2014), and picks from the cumulative distribution in vocabulary order. No generator state exists, so
nothing has to move with a sequence, and neighbours in the batch don't matter.

Order, as in vLLM and transformers: logit bias, repetition, frequency and presence penalties,
suppressed tokens; then, unless greedy, temperature, top-k, top-p (of what top-k left), min-p. Ties
at a cut-off are all kept: which of two equals a sort would drop is not portable between devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine.batch import SamplingRow
from tandem.errors import InternalError, TandemError
from tandem.generation import TokenLogprob, TokenOutput

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them says nothing more and overflows."""

_WINDOW = 256
"""Most likely tokens looked at before a row's whole vocabulary is."""
_TILE = 256
"""Tokens summed in float32 before float64 takes over: keeps the tail's mass at float32's speed."""
_MASK64 = 2**64 - 1

Edit = tuple[NDArray[np.int64], NDArray[np.float32]]


class Sampler:
    """Draws tokens. Stateless: safe to share, and to leave behind when a sequence moves."""

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[TokenOutput | TandemError]:
        """One result per row of `logits` [N, vocab], in order. `logits` is not changed.

        A row without a usable distribution (NaN or infinite logits, or every token suppressed)
        gets an `InternalError` in its place; the other rows get their tokens. Blocks until the
        device is done.
        """
        if not rows:
            return []
        raw = logits.float()
        scores = _edited(raw, rows)
        best = scores.max(dim=-1)  # NaN wins a max, so this finds broken rows at no extra cost
        usable = best.values.isfinite().tolist()
        token_ids: list[int] = best.indices.tolist()
        drawn = [i for i, row in enumerate(rows) if usable[i] and row.sampling.temperature >= GREEDY_BELOW]
        if drawn:
            chosen = _draw(scores, best.values, [rows[i] for i in drawn], drawn)
            for i, token_id in zip(drawn, chosen, strict=True):
                token_ids[i] = token_id
        outputs: list[TokenOutput | TandemError] = [
            TokenOutput(token_id) if ok else _no_distribution(row)
            for row, token_id, ok in zip(rows, token_ids, usable, strict=True)
        ]
        wanted = [i for i, row in enumerate(rows) if usable[i] and row.sampling.logprobs is not None]
        if wanted:
            num_top = [rows[i].sampling.logprobs or 0 for i in wanted]
            described = _with_logprobs(raw, wanted, [token_ids[i] for i in wanted], num_top)
            for i, output in zip(wanted, described, strict=True):
                outputs[i] = output
        return outputs


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1), 53 bits of it, that names the draw at `position` under `seed`."""
    return (_mix64(_mix64(seed) ^ _mix64(~position)) >> 11) * 2.0**-53


def _mix64(value: int) -> int:
    """SplitMix64's output function: a bijection of 64 bits in which each bit moves half the others."""
    z = (value + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _no_distribution(row: SamplingRow) -> InternalError:
    return InternalError(
        f"no token can be drawn at position {row.position}: the model's logits are NaN or infinite, or "
        "every token is suppressed; check the weights with `tandem doctor`, or try another dtype"
    )


# --- bias, penalties and suppression: sparse edits -------------------------------------------------


def _edited(raw: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """`raw` [N, V] with every row's edits in a copy; `raw` itself when no row has any."""
    num_tokens = raw.shape[1]
    scores = raw

    def apply(edits: list[Edit], change: Callable[[Tensor, Tensor], Tensor]) -> None:
        nonlocal scores
        if not edits:
            return
        if scores is raw:
            scores = raw.clone()
        where = torch.from_numpy(np.concatenate([where for where, _ in edits])).to(raw.device)
        values = torch.from_numpy(np.concatenate([values for _, values in edits])).to(raw.device)
        flat = scores.view(-1)
        flat[where] = change(flat[where], values)

    apply(_edits(rows, _bias, num_tokens), torch.add)
    apply(_edits(rows, _repetition, num_tokens), _repeat)
    apply(_edits(rows, _frequency_and_presence, num_tokens), torch.sub)
    apply(_edits(rows, _suppression, num_tokens), torch.add)
    return scores


def _edits(
    rows: Sequence[SamplingRow], of: Callable[[SamplingRow], Edit | None], num_tokens: int
) -> list[Edit]:
    """Each row's edit with flat indices into [N, V]. A row names a token once, so none collide."""
    found = []
    for i, row in enumerate(rows):
        edit = of(row)
        if edit is not None:
            found.append((edit[0] + i * num_tokens, edit[1]))
    return found


def _repeat(scores: Tensor, penalties: Tensor) -> Tensor:
    """Keskar et al. 2019, as transformers has it: push towards less likely on either side of zero."""
    return torch.where(scores > 0, scores / penalties, scores * penalties)


def _bias(row: SamplingRow) -> Edit | None:
    bias = row.sampling.logit_bias
    if not bias:
        return None
    return np.fromiter(bias.keys(), np.int64, len(bias)), np.fromiter(bias.values(), np.float32, len(bias))


def _repetition(row: SamplingRow) -> Edit | None:
    """Tokens of prompt and output alike, each once. O(context) a draw, as attention is."""
    penalty = row.sampling.repetition_penalty
    if penalty == 1.0:
        return None
    seen = np.unique(
        np.concatenate([np.asarray(row.prompt_ids, np.int64), np.asarray(row.output_ids, np.int64)])
    )
    return (seen, np.full(len(seen), penalty, np.float32)) if len(seen) else None


def _frequency_and_presence(row: SamplingRow) -> Edit | None:
    """OpenAI's definition: over the output only; a count's worth and once."""
    sampling = row.sampling
    if (not sampling.frequency_penalty and not sampling.presence_penalty) or not len(row.output_ids):
        return None
    seen, counts = np.unique(np.asarray(row.output_ids, np.int64), return_counts=True)
    return seen, (counts * sampling.frequency_penalty + sampling.presence_penalty).astype(np.float32)


def _suppression(row: SamplingRow) -> Edit | None:
    banned = row.suppress_token_ids
    if not banned:
        return None
    return np.fromiter(banned, np.int64, len(banned)), np.full(len(banned), -np.inf, np.float32)


# --- drawing ---------------------------------------------------------------------------------------


def _draw(scores: Tensor, maxima: Tensor, rows: Sequence[SamplingRow], where: list[int]) -> list[int]:
    """Token ids for `rows`, which are the rows `where` of `scores` [N, V] with `maxima` [N]."""
    if len(where) < len(scores):
        index = torch.tensor(where, device=scores.device)
        scores, maxima = scores[index], maxima[index]
    temperatures = _column(scores, [row.sampling.temperature for row in rows])
    weights = ((scores - maxima.unsqueeze(1)) / temperatures).exp_()  # the likeliest token weighs 1
    cutoffs = _cutoffs(weights, rows)
    if cutoffs is not None:
        weights.masked_fill_(weights < cutoffs, 0.0)
    return _pick(weights, [uniform(row.seed, row.position) for row in rows])


def _column(like: Tensor, values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device).unsqueeze(1)


def _cutoffs(weights: Tensor, rows: Sequence[SamplingRow]) -> Tensor | None:
    """[R, 1] the least weight that each row's top-k, top-p and min-p keep; None: all keep all.

    A sort of 49,152 tokens costs as much as half a decode step of a small model. So a window of the
    likeliest decides, and only rows whose cut lies beyond it look at more.
    """
    vocab = weights.shape[1]
    top_k = [row.sampling.top_k if 0 < row.sampling.top_k < vocab else 0 for row in rows]
    top_p = [row.sampling.top_p for row in rows]
    min_p = [row.sampling.min_p for row in rows]
    if not any(top_k) and min(top_p) >= 1.0:
        return _column(weights, min_p) if any(min_p) else None
    window = weights.topk(min(_WINDOW, vocab), dim=-1).values
    size = window.shape[1]
    cutoffs = _column(weights, min_p)
    if any(top_k):
        last = torch.tensor([max(k - 1, 0) if k <= size else 0 for k in top_k], device=weights.device)
        kth = window.gather(1, last.unsqueeze(1))
        wide_kth = {i: weights[i].topk(k).values[-1] for i, k in enumerate(top_k) if k > size}
        for i, value in wide_kth.items():
            kth[i, 0] = value
        off = torch.tensor([k == 0 for k in top_k], device=weights.device).unsqueeze(1)
        kth.masked_fill_(off, 0.0)
        cutoffs = torch.maximum(cutoffs, kth)
    else:
        kth = torch.zeros_like(cutoffs)
    if min(top_p) >= 1.0:
        return cutoffs
    return torch.maximum(cutoffs, _top_p_cutoffs(weights, window, kth, top_p))


def _top_p_cutoffs(weights: Tensor, window: Tensor, kth: Tensor, top_p: Sequence[float]) -> Tensor:
    """[R, 1] the weight of the last token of each row's nucleus among weights >= `kth`; 0 for top_p 1.

    The nucleus (Holtzman et al. 2019): the fewest likeliest tokens with at least `top_p` of the mass.
    """
    mass = weights.masked_fill(weights < kth, 0.0).sum(dim=1, keepdim=True, dtype=torch.float32).double()
    target = mass * _column(weights, top_p, torch.float64)
    before = window.double().cumsum(1) - window.double()
    inside = (before < target).sum(dim=1, keepdim=True)
    cutoffs = window.gather(1, inside - 1)
    covered = (before[:, -1:] + window[:, -1:].double()) >= target
    for i, ok in enumerate(covered[:, 0].tolist()):
        if top_p[i] >= 1.0:
            cutoffs[i] = 0.0
        elif not ok and window.shape[1] < weights.shape[1]:
            cutoffs[i] = _wide_nucleus(weights[i], float(kth[i]), float(mass[i]), top_p[i])
    return cutoffs


def _wide_nucleus(weights: Tensor, kth: float, mass: float, top_p: float) -> Tensor:
    """The cut-off of one row [V] whose nucleus passes the window, without sorting all of it.

    Tokens lighter than their fair share of the mass outside the nucleus together weigh less than
    that mass: they can't be in it.
    """
    floor = max(kth, (1.0 - top_p) * mass / len(weights))
    candidates = weights[weights >= floor].sort(descending=True).values
    before = candidates.double().cumsum(0) - candidates.double()
    inside = max(1, int((before < top_p * mass).sum()))
    return candidates[inside - 1]


def _pick(weights: Tensor, uniforms: Sequence[float]) -> list[int]:
    """For each row of `weights` [R, V], the first token whose cumulative share passes its uniform.

    Two levels: tiles of the vocabulary, then tokens of one tile, each cumulated in float64. One
    float32 sum over a whole vocabulary would lose tokens lighter than its rounding.
    """
    pad = -weights.shape[1] % _TILE
    tiles = torch.nn.functional.pad(weights, (0, pad)).view(len(weights), -1, _TILE)
    through = tiles.sum(dim=-1).double().cumsum(1)
    target = through[:, -1:] * _column(weights, uniforms, torch.float64)
    tile = torch.searchsorted(through, target, right=True)
    start = through.gather(1, tile) - tiles.sum(dim=-1).double().gather(1, tile)
    inner = tiles[torch.arange(len(weights), device=weights.device), tile[:, 0]].double().cumsum(1)
    # A tile's float32 sum may pass its float64 one by a rounding: stay below the tile's last weight.
    below_end = inner[:, -1:] * (1.0 - math.ulp(1.0))
    token = torch.searchsorted(inner, torch.minimum((target - start).clamp_min(0.0), below_end), right=True)
    picked: list[int] = (tile * _TILE + token)[:, 0].tolist()
    return picked


# --- log-probabilities -----------------------------------------------------------------------------


def _with_logprobs(
    raw: Tensor, where: list[int], token_ids: list[int], num_top: list[int]
) -> list[TokenOutput]:
    """The tokens `token_ids` of the rows `where` of `raw` [N, V] with log-probabilities, before any edit."""
    logprobs = raw[torch.tensor(where, device=raw.device)].log_softmax(dim=-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=raw.device).unsqueeze(1))[:, 0].tolist()
    top = logprobs.topk(min(max(num_top), logprobs.shape[1]), dim=-1)
    outputs = []
    for token_id, logprob, count, ids, values in zip(
        token_ids, chosen, num_top, top.indices.tolist(), top.values.tolist(), strict=True
    ):
        best = tuple(TokenLogprob(i, v) for i, v in zip(ids[:count], values[:count], strict=True))
        outputs.append(TokenOutput(token_id, logprob, best))
    return outputs
