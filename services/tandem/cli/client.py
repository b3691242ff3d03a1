"""``tandem generate``: a prompt in, the answer streamed to stdout."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.common import AddressOption, console, run
from tandem.errors import InvalidRequest, Unavailable

if TYPE_CHECKING:
    from tandem.clock import Clock
    from tandem.generation import CallContext
    from tandem.request import Request
    from tandem.rpc.services import GenerateChunk, InferenceService
    from tandem.telemetry.timeline import Timeline


def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads it from stdin.")],
    address: AddressOption = "127.0.0.1:50051",
    model: Annotated[str, typer.Option("--model", "-m", help="A served model. [default: the only one]")] = "",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text; no chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="At most so many tokens.")] = 256,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Only the k best tokens; 0: all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="For the same answer again.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End at this text. May be repeated.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds for the whole answer.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Show where the time went.")] = False,
) -> None:
    """Ask a running cluster."""

    async def main() -> None:
        from tandem.clock import Deadline
        from tandem.generation import CallContext
        from tandem.request import ChatMessage, Request, SamplingParams
        from tandem.rpc.channels import ChannelPool
        from tandem.rpc.clients import GrpcInference
        from tandem.system import SystemClock

        text = sys.stdin.read() if prompt == "-" else prompt
        if not text:
            raise InvalidRequest("prompt", "must not be empty")
        sampling = SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop=tuple(stop or ()),
            max_tokens=max_tokens,
        )
        messages = (ChatMessage("system", system),) if system else ()
        request = (
            Request(model=model, prompt=text, sampling=sampling)
            if raw
            else Request(model=model, messages=(*messages, ChatMessage("user", text)), sampling=sampling)
        )
        clock = SystemClock()
        context = CallContext(None if timeout is None else Deadline.after(clock, timeout))
        async with ChannelPool() as pool:
            try:
                last, timeline = await stream_answer(
                    GrpcInference(pool, address, clock), request, context, clock
                )
            except Unavailable as error:
                raise Unavailable(f"{error}; is a cluster running there? `tandem up` starts one") from None
        if stats:
            show_stats(last, timeline)

    run(main)


async def stream_answer(
    service: InferenceService, request: Request, context: CallContext, clock: Clock
) -> tuple[GenerateChunk, Timeline]:
    """Write the answer to stdout as it comes; returns the last chunk, and when the tokens came."""
    from contextlib import aclosing

    from tandem.telemetry.timeline import Timeline

    start_s = clock.monotonic_s()
    token_times_s: list[float] = []
    async with aclosing(service.generate(request, context)) as chunks:
        async for chunk in chunks:
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
            token_times_s.extend([clock.monotonic_s()] * len(chunk.tokens))
    sys.stdout.write("\n")
    sys.stdout.flush()
    return chunk, Timeline(start_s, tuple(token_times_s), clock.monotonic_s())


def show_stats(last: GenerateChunk, timeline: Timeline) -> None:
    """The phase table of an answer, and its latencies as the client saw them."""
    from rich.table import Table

    from tandem.telemetry.timeline import TABLE_HEADER, table_rows

    table = Table(*TABLE_HEADER, title=f"trace {last.trace_id}", title_justify="left")
    for row in table_rows(last.phases):
        table.add_row(*row)
    console.print(table)
    usage = last.usage
    parts = []
    if timeline.ttft_s is not None:
        parts.append(f"TTFT {timeline.ttft_s * 1e3:.0f} ms")
    if timeline.tpot_s is not None:
        parts.append(f"TPOT {timeline.tpot_s * 1e3:.1f} ms")
    if usage is not None:
        parts.append(f"{usage.completion_tokens} tokens")
        parts.append(f"prefix hit: {usage.cached_tokens} of {usage.prompt_tokens} prompt tokens")
    console.print(" · ".join(parts))
