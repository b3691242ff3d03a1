"""Starts a whole cluster: Redis, Ray's workers and a gateway; and takes it all down again."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

# Ray would warn of what a later version does with GPUs when none are asked for.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray.exceptions import RayError, RayTaskError

from tandem.cluster.actors import STOP_GRACE_S, WorkerActor
from tandem.cluster.placement import NAMESPACE, local_ray_options, worker_options, workers_of
from tandem.config.settings import Settings
from tandem.directory.embedded import EmbeddedRedis
from tandem.errors import ConfigError, DeadlineExceeded, TandemError, Unavailable
from tandem.gateway.node import GatewayNode, open_gateway
from tandem.ids import WorkerId
from tandem.rpc.address import check_bindable
from tandem.system import SystemClock, SystemIds

logger = logging.getLogger(__name__)

Report = Callable[[str], None]
"""Is told what is being done, for a progress display."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """What runs. `gateway` serves in this process, each worker in its own."""

    gateway: GatewayNode
    redis_url: str
    actors: dict[WorkerId, Any]

    @property
    def address(self) -> str:
        """The public endpoint, ``host:port``."""
        return self.gateway.address

    async def pids(self) -> dict[str, int]:
        """The processes, by what runs in them."""
        pids: dict[str, int] = {"gateway": os.getpid()}
        for name, actor in self.actors.items():
            pids[name] = await actor.pid.remote()
        return pids


@asynccontextmanager
async def open_cluster(settings: Settings, *, report: Report = logger.info) -> AsyncIterator[Cluster]:
    """Start everything that `settings.cluster` asks for; when the block ends, nothing is left.

    Joins the Ray cluster that ``RAY_ADDRESS`` names, or starts one on this machine. Redis is the one
    at `directory.redis_url`, or a server of our own. `settings.model.ref` is a local folder.
    Raises what a worker's start raised, `ConfigError`, `Unavailable`, `DeadlineExceeded`.
    """
    if os.environ.get("RAY_ADDRESS") and settings.directory.redis_url is None:
        raise ConfigError(
            "directory.redis_url (TANDEM_DIRECTORY__REDIS_URL) is missing: workers of the Ray cluster at "
            "RAY_ADDRESS can't reach a Redis that is embedded here"
        )
    await check_bindable(
        settings.gateway.host, settings.gateway.port
    )  # minutes earlier than the gateway would
    async with AsyncExitStack() as stack:
        report("starting Redis")
        redis_url = stack.enter_context(_redis(settings))
        report("starting Ray")
        await asyncio.to_thread(_start_ray, settings)
        stack.push_async_callback(asyncio.to_thread, ray.shutdown)
        actors = _start_workers(settings, redis_url)
        stack.push_async_callback(_stop_workers, actors, settings)
        names = ", ".join(actors)
        report(f"starting {names}")
        await _wait_ready(actors, settings.cluster.start_timeout_s)
        report("starting the gateway")
        gateway = await stack.enter_async_context(
            open_gateway(settings, redis_url=redis_url, clock=SystemClock(), ids=SystemIds())
        )
        await gateway.directory.wait_until(
            lambda: {record.worker_id for record in gateway.directory.workers()} >= set(actors),
            settings.cluster.start_timeout_s,
        )
        yield Cluster(gateway, redis_url, actors)


@contextmanager
def _redis(settings: Settings) -> Iterator[str]:
    """The URL of the Redis that all share: the one that was given, or a server of our own."""
    given = settings.directory.redis_url
    if given is not None:
        yield given.get_secret_value()
        return
    with EmbeddedRedis() as own:
        yield own.url


def _start_ray(settings: Settings) -> None:
    try:
        if os.environ.get("RAY_ADDRESS"):
            ray.init(namespace=NAMESPACE, logging_level=logging.ERROR)
        else:
            ray.init(**local_ray_options(settings))
    except (RuntimeError, ConnectionError, ValueError, OSError, RayError) as error:
        raise ConfigError(f"Ray can't be started: {error}; `tandem doctor` tells more") from error


def _start_workers(settings: Settings, redis_url: str) -> dict[WorkerId, Any]:
    remote = ray.remote(WorkerActor)
    try:
        return {
            worker_id: remote.options(**worker_options(worker_id, role, settings)).remote(
                settings, worker_id, role, redis_url
            )
            for worker_id, role in workers_of(settings)
        }
    except ValueError as error:  # a name is taken
        raise ConfigError(f"{error}; stop the cluster that runs there, or leave RAY_ADDRESS unset") from error


async def _wait_ready(actors: dict[WorkerId, Any], timeout_s: float) -> None:
    """Return once all serve. Raises the first failure as the worker itself raised it."""
    waiting = {asyncio.ensure_future(_address(name, actor, timeout_s)) for name, actor in actors.items()}
    try:
        done, late = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        if late:
            raise DeadlineExceeded(
                f"the workers were not ready after {timeout_s:g} s; see their logs above, or raise "
                "cluster.start_timeout_s"
            )
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _address(worker_id: WorkerId, actor: Any, timeout_s: float) -> str:
    try:
        return str(await actor.address.remote(timeout_s))
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, TandemError):
            raise cause from None
        raise Unavailable(f"worker {worker_id} did not start: {cause!r}") from error
    except RayError as error:
        raise Unavailable(f"worker {worker_id} did not start: {error}") from error


async def _stop_workers(actors: dict[WorkerId, Any], settings: Settings) -> None:
    """Let them drain, all at once, then end their processes."""
    stops: Sequence[Any] = [actor.stop.remote() for actor in actors.values()]
    timeout_s = settings.worker.drain_s + 2 * STOP_GRACE_S
    await asyncio.wait([asyncio.ensure_future(_quietly(stop)) for stop in stops], timeout=timeout_s)
    for actor in actors.values():
        ray.kill(actor)


async def _quietly(reference: Any) -> None:
    try:
        await reference
    except RayError as error:
        logger.info("a worker was gone before it was stopped: %s", error)
