"""``tandem up`` and the single roles it is made of."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.common import (
    ConfigOption,
    ModelOption,
    SetOption,
    console,
    heed_sigterm,
    read_settings,
    run,
)
from tandem.cli.common import set_up_logs as _set_up_logs
from tandem.cli.common import with_model as _with_model
from tandem.errors import ConfigError

if TYPE_CHECKING:
    from tandem.config.settings import Settings
    from tandem.directory.base import Role

RedisOption = Annotated[
    str | None, typer.Option("--redis-url", help="redis://, rediss:// or unix://.", show_default=False)
]
IdOption = Annotated[
    str | None, typer.Option("--id", help="The worker's stable name, e.g. decode-0.", show_default=False)
]


def up(
    prefill: Annotated[int | None, typer.Option(min=0, help="Prefill workers. [default: 1]")] = None,
    decode: Annotated[int | None, typer.Option(min=1, help="Decode workers. [default: 1]")] = None,
    model: ModelOption = None,
    host: Annotated[str | None, typer.Option(help="Listen here. [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="Listen here; 0: any. [default: 50051]")] = None,
    config: ConfigOption = None,
    sets: SetOption = None,
) -> None:
    """Start Redis, Ray, the workers and a gateway on this machine, until Ctrl-C."""

    async def main() -> None:
        from tandem.cluster.launcher import open_cluster

        settings = read_settings(
            config,
            sets,
            {
                "cluster": {"num_prefill": prefill, "num_decode": decode},
                "model": {"ref": model},
                "gateway": {"host": host, "port": port},
            },
        )
        _set_up_logs("gateway", settings)
        settings = await asyncio.to_thread(_with_model, settings)
        async with AsyncExitStack() as stack:
            stack.callback(console.print, "stopped")
            with console.status("starting …") as status:
                running = await stack.enter_async_context(
                    open_cluster(settings, report=lambda what: status.update(f"{what} …"))
                )
            heed_sigterm()
            console.print(
                f"[bold green]ready[/]: model [bold]{settings.model.name}[/] at [bold]{running.address}[/] "
                f"with {settings.cluster.num_prefill} prefill and {settings.cluster.num_decode} decode "
                f'workers\n  try: tandem generate --address {running.address} "Hello!"\n  Ctrl-C stops it'
            )
            stack.callback(console.print, "stopping …")
            await asyncio.Event().wait()

    run(main)


def gateway(
    redis_url: RedisOption = None,
    model: ModelOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
) -> None:
    """Run one gateway in this process."""

    async def main() -> None:
        from tandem.gateway.node import open_gateway
        from tandem.system import SystemClock, SystemIds

        settings, url = await _role_settings("gateway", redis_url, model, config, sets)
        async with open_gateway(settings, redis_url=url, clock=SystemClock(), ids=SystemIds()) as node:
            console.print(f"[bold green]ready[/]: gateway at [bold]{node.address}[/]")
            await asyncio.Event().wait()

    run(main)


def prefill(
    redis_url: RedisOption = None,
    worker_id: IdOption = None,
    model: ModelOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
) -> None:
    """Run one prefill worker in this process."""
    from tandem.directory.base import Role

    _run_worker(Role.PREFILL, redis_url, worker_id, model, config, sets)


def decode(
    redis_url: RedisOption = None,
    worker_id: IdOption = None,
    model: ModelOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
) -> None:
    """Run one decode worker in this process."""
    from tandem.directory.base import Role

    _run_worker(Role.DECODE, redis_url, worker_id, model, config, sets)


def _run_worker(
    role: Role,
    redis_url: str | None,
    worker_id: str | None,
    model: str | None,
    config: ConfigOption,
    sets: list[str] | None,
) -> None:
    async def main() -> None:
        from tandem.ids import WorkerId
        from tandem.system import SystemClock, SystemIds
        from tandem.worker.node import open_worker

        settings, url = await _role_settings(role.value, redis_url, model, config, sets)
        name = WorkerId(worker_id or f"{role.value}-0")
        async with open_worker(
            settings, worker_id=name, role=role, redis_url=url, clock=SystemClock(), ids=SystemIds()
        ) as node:
            console.print(f"[bold green]ready[/]: worker {name} at [bold]{node.address}[/]")
            try:
                await node.wait_closed()
            except asyncio.CancelledError:  # told to stop: what runs may end first
                await node.drain()
                raise

    run(main)


async def _role_settings(
    role: str, redis_url: str | None, model: str | None, config: ConfigOption, sets: list[str] | None
) -> tuple[Settings, str]:
    """Settings of a role that joins others, and the Redis that they share."""
    settings = read_settings(config, sets, {"directory": {"redis_url": redis_url}, "model": {"ref": model}})
    _set_up_logs(role, settings)
    url = settings.directory.redis_url
    if url is None:
        raise ConfigError(
            "--redis-url (TANDEM_DIRECTORY__REDIS_URL) is missing: a single role needs the Redis that all "
            "share, e.g. redis://127.0.0.1:6379; `tandem up` brings its own"
        )
    return await asyncio.to_thread(_with_model, settings), url.get_secret_value()
