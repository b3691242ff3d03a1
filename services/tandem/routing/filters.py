"""Who may serve a query at all, and what to say when nobody may."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tandem.directory.base import Role, WorkerRecord, WorkerState
from tandem.errors import NoWorker, OutOfBlocks
from tandem.ids import WorkerId
from tandem.routing.query import RouteQuery


def num_blocks_wanted(query: RouteQuery, worker: WorkerRecord) -> int:
    """Blocks that the prompt and the first token after it take on this worker, hits included."""
    return (query.num_prompt_tokens + worker.block_size_tokens) // worker.block_size_tokens


def eligible(
    query: RouteQuery,
    workers: Sequence[WorkerRecord],
    role: Role,
    inhibited_s: Mapping[WorkerId, float],
) -> tuple[WorkerRecord, ...]:
    """Ready workers of the pool that hold this layout, are not avoided and can ever hold the prompt."""
    return tuple(
        worker
        for worker in workers
        if worker.role is role
        and worker.state is WorkerState.READY
        and worker.layout_fingerprint == query.layout_fingerprint
        and worker.worker_id not in query.excluded
        and worker.worker_id not in inhibited_s
        and query.num_prompt_tokens < worker.max_context_tokens
        and num_blocks_wanted(query, worker) <= worker.num_blocks
    )


def explain_none(
    query: RouteQuery,
    workers: Sequence[WorkerRecord],
    role: Role,
    inhibited_s: Mapping[WorkerId, float],
) -> NoWorker | OutOfBlocks:
    """The error for an empty `eligible`: which pool lacks what, and the cure.

    `OutOfBlocks` when workers are ready but none of them can ever hold the prompt.
    """
    start = f"tandem up --{role.value} 1"
    pool = [worker for worker in workers if worker.role is role]
    if not pool:
        return NoWorker(f"the {role.value} pool has no worker; start one: {start}")
    ready = [worker for worker in pool if worker.state is WorkerState.READY]
    if not ready:
        states = ", ".join(f"{worker.worker_id} is {worker.state.value}" for worker in pool)
        return NoWorker(f"the {role.value} pool has no ready worker ({states}); wait, or start one: {start}")
    fitting = [worker for worker in ready if worker.layout_fingerprint == query.layout_fingerprint]
    if not fitting:
        return NoWorker(
            f"the {role.value} pool has no ready worker with KV layout {query.layout_fingerprint}: its "
            f"workers serve another model, dtype or block size; start one with this model: {start}"
        )
    able = [
        worker
        for worker in fitting
        if worker.worker_id not in query.excluded and worker.worker_id not in inhibited_s
    ]
    if not able:
        avoided = ", ".join(
            f"{worker.worker_id} failed and is avoided for {inhibited_s[worker.worker_id]:.1f} s more"
            if worker.worker_id in inhibited_s
            else f"{worker.worker_id} already failed this request"
            for worker in fitting
        )
        return NoWorker(f"the {role.value} pool has no worker left ({avoided}); retry, or start one: {start}")
    largest = max(able, key=lambda worker: worker.num_blocks)
    wanted = num_blocks_wanted(query, largest)
    if wanted > largest.num_blocks:
        return OutOfBlocks(wanted=wanted, free=largest.num_blocks)
    return NoWorker(
        f"no {role.value} worker takes a prompt of {query.num_prompt_tokens} tokens: the longest context is "
        f"{max(worker.max_context_tokens for worker in able)}; start one with a longer context: {start}"
    )
