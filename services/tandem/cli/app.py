"""The commands, by name."""

from __future__ import annotations

from typing import Annotated

import typer

import tandem
from tandem.cli.client import generate
from tandem.cli.demo import demo
from tandem.cli.doctor import doctor
from tandem.cli.model import pull
from tandem.cli.serve import decode, gateway, prefill, up

app = typer.Typer(
    name="tandem",
    help="Disaggregated prefill/decode serving for large language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for command in (up, generate, demo, doctor, pull, gateway, prefill, decode):
    app.command()(command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tandem {tandem.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Disaggregated prefill/decode serving for large language models."""
