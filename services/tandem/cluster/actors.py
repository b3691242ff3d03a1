"""A worker as a Ray actor. Ray places, starts and restarts it; no request byte goes through Ray."""

from __future__ import annotations

import logging
import os
import time
import warnings

import ray

from tandem.cluster.host import NodeHost
from tandem.config.settings import Settings
from tandem.directory.base import Role
from tandem.ids import WorkerId
from tandem.system import SystemClock, SystemIds
from tandem.telemetry.logs import set_up_logging

logger = logging.getLogger(__name__)

_RETRY_S = 3.0
STOP_GRACE_S = 10.0
"""What a worker may need to stop on top of `worker.drain_s`."""


class WorkerActor:
    """The class behind the actor; `placement.worker_options` says how Ray runs it.

    Its methods may block: Ray runs them in threads. When the worker stops by itself (a newer life
    of it is known, its engine died) the process ends, and Ray starts it anew. So it does, after a
    pause, when a restart fails; the first start's failure is told to whoever asks for the address.
    """

    def __init__(self, settings: Settings, worker_id: WorkerId, role: Role, redis_url: str) -> None:
        set_up_logging(
            worker_id,
            level=settings.telemetry.log_level.value,
            as_json=settings.telemetry.log_format.value == "json",
        )
        # Imported here, in the worker's process: the launcher needs neither torch nor UCX.
        from tandem.worker.node import open_worker

        self._stop_timeout_s = settings.worker.drain_s + STOP_GRACE_S
        self._host = NodeHost(
            lambda: open_worker(
                settings,
                worker_id=worker_id,
                role=role,
                redis_url=redis_url,
                clock=SystemClock(),
                ids=SystemIds(),
            ),
            _end_process,
            _retry_later if _is_restart() else _wait_to_be_asked,
        )

    def address(self, timeout_s: float) -> str:
        """Its control address, once it is ready. Raises what starting it raised."""
        return self._host.address(timeout_s)

    def pid(self) -> int:
        """The process it runs in."""
        return os.getpid()

    def stop(self) -> None:
        """Drain, leave the directory, and free everything."""
        self._host.stop(self._stop_timeout_s)


def _is_restart() -> bool:
    with warnings.catch_warnings():  # Ray's own property uses what Ray deprecates
        warnings.simplefilter("ignore")
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def _wait_to_be_asked() -> None:
    """The launcher asks for the address next, and hears why there is none."""


def _retry_later() -> None:
    logger.error("the worker could not be started anew; another try follows in %g s", _RETRY_S)
    time.sleep(_RETRY_S)  # in the node's own thread, which has nothing else to do
    _end_process()


def _end_process() -> None:
    logger.error("the worker has stopped; its process ends, to be started anew")
    logging.shutdown()
    os._exit(1)
