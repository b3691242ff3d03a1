"""Settings that are a choice of few. Standard library only: whoever acts on a choice imports it from here."""

from __future__ import annotations

from enum import Enum


class ModelDtype(Enum):
    """Element type of activations and of the KV cache."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class WeightFormat(Enum):
    """How linear layers keep their weights in memory."""

    FULL = "full"
    INT8 = "int8"


class TransportKind(Enum):
    """What moves KV blocks between workers; `inproc` only within one process."""

    UCX = "ucx"
    INPROC = "inproc"


class DisaggregationMode(Enum):
    """Where prompts are computed."""

    AUTO = "auto"
    """On a prefill worker, unless the decode worker is predicted to be faster or must do it."""

    ALWAYS = "always"
    """On a prefill worker, or not at all."""

    NEVER = "never"
    """On the decode worker that goes on with it."""


class LogFormat(Enum):
    """How a log line looks."""

    CONSOLE = "console"
    JSON = "json"


class LogLevel(Enum):
    """The least severe of our own log records that is shown."""

    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"
