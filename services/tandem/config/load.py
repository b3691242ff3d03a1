"""Where settings come from: options over variables over a file over defaults, merged field by field."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, SecretStr, ValidationError
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from tandem.config.settings import Settings
from tandem.errors import ConfigError

ENV_PREFIX = "TANDEM_"
ENV_DELIMITER = "__"


def load_settings(
    config_file: Path | None = None, overrides: Mapping[str, Mapping[str, Any]] | None = None
) -> Settings:
    """The settings of this process. Reads `config_file` (.toml, .yaml, .yml) and ``os.environ``.

    `overrides` are command-line options by section; an option that is None was not given. Raises
    `ConfigError` that names each wrong setting, its variable and what it may be.
    """
    _refuse_unknown_variables(os.environ)
    from_file = {} if config_file is None else _read_file(config_file)
    given: dict[str, Any] = {
        section: {name: value for name, value in options.items() if value is not None}
        for section, options in (overrides or {}).items()
    }

    class FromEverywhere(Settings, BaseSettings):
        model_config = SettingsConfigDict(
            env_prefix=ENV_PREFIX,
            env_nested_delimiter=ENV_DELIMITER,
            frozen=True,
            extra="forbid",
            protected_namespaces=(),
        )

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            options = InitSettingsSource(settings_cls, init_kwargs=given)
            return options, env_settings, InitSettingsSource(settings_cls, init_kwargs=from_file)

    try:
        merged = FromEverywhere()
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error))) from None
    except SettingsError as error:
        raise ConfigError(f"{error}; write a section as JSON, or set its fields one by one") from None
    # A class made in a function can't be pickled, and settings travel to Ray actors: hand on the plain tree.
    return Settings(**{name: getattr(merged, name) for name in Settings.model_fields})


def variable_name(path: str) -> str:
    """The variable of a setting: ``engine.num_blocks`` is ``TANDEM_ENGINE__NUM_BLOCKS``."""
    return ENV_PREFIX + path.upper().replace(".", ENV_DELIMITER)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"--config {path}: can't be read: {reason}") from None
    try:
        if path.suffix == ".toml":
            content: Any = tomllib.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            content = yaml.safe_load(text)
        else:
            raise ConfigError(f"--config {path}: the name must end in .toml, .yaml or .yml")
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)  # YAML's own text quotes the file, secrets included
        where = f"line {mark.line + 1}" if mark is not None else str(error).splitlines()[0]
        raise ConfigError(f"--config {path}: not valid {path.suffix[1:].upper()}: {where}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: must hold sections: {', '.join(Settings.model_fields)}")
    return content


def _refuse_unknown_variables(environ: Mapping[str, str]) -> None:
    """A misspelt section would be ignored in silence; misspelt fields are found by validation."""
    for name in sorted(environ):
        section, delimiter, _ = name.removeprefix(ENV_PREFIX).partition(ENV_DELIMITER)
        if name.startswith(ENV_PREFIX) and delimiter and section.lower() not in Settings.model_fields:
            raise ConfigError(
                f"{name}: there is no section {section.lower()!r}"
                f"{_did_you_mean(section.lower(), Settings.model_fields)}; "
                f"sections are {', '.join(Settings.model_fields)}"
            )


def _explain(error: ValidationError) -> Iterator[str]:
    for problem in error.errors(include_url=False, include_context=False):
        location = problem["loc"]
        path = ".".join(str(part) for part in location)
        holder, field = _resolve(location)
        if problem["type"] == "extra_forbidden":
            known = holder.model_fields if holder is not None else {}
            yield (
                f"{path}: there is no such setting{_did_you_mean(str(location[-1]), known)}; "
                f"known are {', '.join(known)}"
            )
            continue
        message = problem["msg"].removeprefix("Value error, ")
        message = message.replace("Input should be", "must be", 1)
        shown = ""
        if isinstance(problem["input"], str | int | float | bool) and not _is_secret(field):
            shown = f", not {problem['input']!r}"
        yield f"{path} ({variable_name(path)}): {message}{shown}"


def _resolve(location: tuple[int | str, ...]) -> tuple[type[BaseModel] | None, Any]:
    """The section that a location lies in, and the annotation of its last field."""
    holder: type[BaseModel] | None = Settings
    annotation: Any = None
    for depth, part in enumerate(location):
        info = holder.model_fields.get(str(part)) if holder is not None else None
        if info is None:
            return holder, None
        annotation = info.annotation
        is_section = isinstance(annotation, type) and issubclass(annotation, BaseModel)
        if depth < len(location) - 1:
            holder = annotation if is_section else None
    return holder, annotation


def _is_secret(annotation: Any) -> bool:
    return annotation is None or annotation is SecretStr or SecretStr in getattr(annotation, "__args__", ())


def _did_you_mean(name: str, known: Mapping[str, Any]) -> str:
    close = get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
