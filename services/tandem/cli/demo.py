"""``tandem demo``: a cluster of several processes, one question asked twice, and where the time went."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from tandem.cli.client import show_stats, stream_answer
from tandem.cli.common import (
    ConfigOption,
    ModelOption,
    SetOption,
    console,
    heed_sigterm,
    read_settings,
    run,
    set_up_logs,
    with_model,
)
from tandem.errors import InternalError

if TYPE_CHECKING:
    from tandem.rpc.services import GenerateChunk

QUESTION = "Why is the sky blue? Answer in two sentences."


def demo(
    question: Annotated[str, typer.Argument(help="What to ask.")] = QUESTION,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="At most so many tokens.")] = 64,
    model: ModelOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
) -> None:
    """Start a small cluster, ask it a question twice, and show every phase of the answers."""

    async def main() -> None:
        with tempfile.TemporaryDirectory(prefix="tandem-demo-") as folder:
            await _demo(question, max_tokens, model, config, sets, Path(folder))

    run(main)


async def _demo(
    question: str,
    max_tokens: int,
    model: str | None,
    config: ConfigOption,
    sets: list[str] | None,
    trace_dir: Path,
) -> None:
    from tandem.cluster.launcher import open_cluster
    from tandem.generation import CallContext
    from tandem.request import ChatMessage, Request, SamplingParams
    from tandem.rpc.channels import ChannelPool
    from tandem.rpc.clients import GrpcInference
    from tandem.system import SystemClock

    settings = read_settings(
        config,
        sets,
        {
            "model": {"ref": model},
            "gateway": {"port": 0, "disaggregation": "always"},
            "telemetry": {"trace_dir": trace_dir, "log_level": "WARNING"},
        },
    )
    set_up_logs("gateway", settings)
    settings = await asyncio.to_thread(with_model, settings)
    request = Request(
        messages=(ChatMessage("user", question),),
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens),
    )
    answers: list[GenerateChunk] = []
    async with AsyncExitStack() as stack:
        with console.status("starting …") as status:
            running = await stack.enter_async_context(
                open_cluster(settings, report=lambda what: status.update(f"{what} …"))
            )
        heed_sigterm()
        stack.callback(console.print, "\nstopping …")
        pids = await running.pids()
        console.print("processes: " + ", ".join(f"{name} [dim]{pid}[/]" for name, pid in pids.items()))
        clock = SystemClock()
        async with ChannelPool() as pool:
            service = GrpcInference(pool, running.address, clock)
            for title in ("first time", "again: its prefix is cached now"):
                console.print(Text.assemble("\n", (question, "bold"), (f"  ({title})", "dim")))
                last, timeline = await stream_answer(service, request, CallContext(), clock)
                answers.append(last)
                show_stats(last, timeline)
    _show_trace(trace_dir, answers[0].trace_id)
    if len(set(pids.values())) < 3:
        raise InternalError("gateway, prefill and decode did not run in processes of their own")
    console.print("\n[bold green]done[/]: every phase is in one trace; nothing is left running")


def _show_trace(folder: Path, trace_id: str) -> None:
    """Print one trace from all processes' span files. Raises `InternalError` if a phase is missing."""
    from tandem.generation import Phase
    from tandem.telemetry.names import phase_span
    from tandem.telemetry.span_file import read_spans, span_tree

    spans = read_spans(folder, trace_id)
    console.print(f"\ntrace {trace_id}, {len({span.service for span in spans})} services:")
    for depth, span in span_tree(spans):
        console.print(
            f"  {'  ' * depth}{span.name}  [dim]{span.service}  {span.duration_s * 1e3:.1f} ms[/]",
            soft_wrap=True,
        )
    missing = {phase_span(phase) for phase in Phase} - {span.name for span in spans}
    if missing:
        raise InternalError(f"the trace lacks {', '.join(sorted(missing))}; please report it")
