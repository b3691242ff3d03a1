"""What all commands share: options, settings, the event loop, and how errors look."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from tandem.errors import ConfigError, TandemError

if TYPE_CHECKING:
    from tandem.config.settings import Settings

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

console = Console(stderr=True, highlight=False)
"""For people. What a program may want to read goes to stdout."""

ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", help="Settings as .toml or .yaml.", show_default=False)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any setting, e.g. engine.num_blocks=512.", metavar="SECTION.NAME=VALUE"),
]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", "-m", help="A model folder, a .gguf file or a known name.", show_default=False),
]
AddressOption = Annotated[str, typer.Option("--address", "-a", help="A gateway, HOST:PORT.")]


def read_settings(
    config: Path | None, sets: list[str] | None, options: Mapping[str, Mapping[str, Any]] | None = None
) -> Settings:
    """Settings from everywhere; options of their own win over ``--set``. Raises `ConfigError`."""
    from tandem.config.load import load_settings

    overrides: dict[str, dict[str, Any]] = {}
    for item in sets or ():
        path, equals, value = item.partition("=")
        section, dot, name = path.partition(".")
        if not (equals and dot and section and name):
            raise ConfigError(f"--set {item}: write SECTION.NAME=VALUE, e.g. engine.num_blocks=512")
        overrides.setdefault(section, {})[name] = value
    for section, given in (options or {}).items():
        overrides.setdefault(section, {}).update({k: v for k, v in given.items() if v is not None})
    return load_settings(config, overrides)


def fetch(ref: str, *, progress: bool = True) -> Path:
    """The model's local folder. Says so first if that takes a while. Raises `ModelLoadError`."""
    from tandem.model.pull import ALIASES, cached_model, ensure_model

    if progress and ref in ALIASES and cached_model(ref) is None:
        console.print(Text.assemble("fetching and converting model ", (ref, "bold"), ", once …"))
    return ensure_model(ref, progress=progress)


def with_model(settings: Settings, *, progress: bool = True) -> Settings:
    """The same settings with the model made a local folder, fetched if need be; its name stays."""
    folder = fetch(settings.model.ref, progress=progress)
    model = settings.model.model_copy(update={"ref": str(folder), "served_name": settings.model.name})
    return settings.model_copy(update={"model": model})


@contextmanager
def clear_errors() -> Iterator[None]:
    """Our errors become one red line, and an exit status, instead of a traceback."""
    try:
        yield
    except TandemError as error:
        console.print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
        raise typer.Exit(EXIT_FAILED) from None
    except KeyboardInterrupt:
        console.print("interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from None


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `main` on uvloop. SIGTERM ends it as Ctrl-C does: by cancelling, so that clean-up runs."""
    import uvloop

    async def interruptible() -> None:
        heed_sigterm()
        await main()

    with clear_errors():
        try:
            uvloop.run(interruptible())
        except asyncio.CancelledError:  # SIGTERM
            raise typer.Exit(128 + signal.SIGTERM) from None


def heed_sigterm() -> None:
    """Have SIGTERM cancel the current task. Again after Ray has started: it puts its own handler there."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def set_up_logs(role: str, settings: Settings) -> None:
    """This process's logs, to stderr."""
    from tandem.telemetry.logs import set_up_logging

    telemetry = settings.telemetry
    set_up_logging(role, level=telemetry.log_level.value, as_json=telemetry.log_format.value == "json")
