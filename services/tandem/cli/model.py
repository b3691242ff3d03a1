"""``tandem pull``."""

from __future__ import annotations

from typing import Annotated

import typer

from tandem.cli.common import clear_errors, fetch


def pull(
    ref: Annotated[str, typer.Argument(help="A known name, or a .gguf file.")] = "smollm2-135m",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")] = False,
) -> None:
    """Fetch and convert a model ahead of time; prints the folder."""
    with clear_errors():
        typer.echo(fetch(ref, progress=not quiet))
