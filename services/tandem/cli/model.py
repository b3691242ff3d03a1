"""``tandem pull``."""

from __future__ import annotations

from typing import Annotated

import typer

from tandem.cli.common import clear_errors, console


def pull(
    ref: Annotated[str, typer.Argument(help="A known name, or a .gguf file.")] = "smollm2-135m",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")] = False,
) -> None:
    """Fetch and convert a model ahead of time; prints the folder."""
    from tandem.model.pull import cached_model, ensure_model

    with clear_errors():
        if cached_model(ref) is None and not quiet:
            console.print(f"fetching and converting model [bold]{ref}[/], once …")
        typer.echo(ensure_model(ref, progress=not quiet))
