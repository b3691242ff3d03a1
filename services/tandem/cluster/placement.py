"""Which Ray resources a worker takes, and what a Ray of our own offers."""

from __future__ import annotations

import logging
import os
from typing import Any

from tandem.config.settings import Settings
from tandem.directory.base import Role
from tandem.ids import WorkerId

NAMESPACE = "tandem"
_OBJECT_STORE_BYTES = 80 << 20
"""Nothing of ours goes through Ray's object store; this is the least that Ray accepts."""


def actor_name(worker_id: WorkerId) -> str:
    """The detached actor's name, e.g. ``tandem-decode-0``."""
    return f"tandem-{worker_id}"


def workers_of(settings: Settings) -> list[tuple[WorkerId, Role]]:
    """Names and pools of the workers that the settings ask for, prefill first."""
    wanted = ((Role.PREFILL, settings.cluster.num_prefill), (Role.DECODE, settings.cluster.num_decode))
    return [(WorkerId(f"{role.value}-{number}"), role) for role, count in wanted for number in range(count)]


def worker_options(worker_id: WorkerId, role: Role, settings: Settings) -> dict[str, Any]:
    """Options of a worker's actor: one unit of its pool, kept alive, restarted whenever it dies."""
    threads = settings.worker.num_threads or os.cpu_count() or 1
    return {
        "name": actor_name(worker_id),
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "resources": {role.value: 1},
        "num_cpus": 0,  # pools are the measure; a CPU count would only limit how many workers fit
        "max_restarts": -1,
        "max_concurrency": 4,
        # Ray would give torch one thread, as no CPU is asked for.
        "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(threads), "UCX_WARN_UNUSED_ENV_VARS": "n"}},
    }


def local_ray_options(settings: Settings) -> dict[str, Any]:
    """Arguments of `ray.init` for a Ray of our own on this machine."""
    return {
        "address": "local",
        "namespace": NAMESPACE,
        "num_cpus": os.cpu_count() or 1,
        "resources": {
            Role.PREFILL.value: settings.cluster.num_prefill,
            Role.DECODE.value: settings.cluster.num_decode,
        },
        "include_dashboard": False,
        "object_store_memory": _OBJECT_STORE_BYTES,
        "logging_level": logging.ERROR,
    }
