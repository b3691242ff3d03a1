"""All settings, one tree. Frozen, picklable, validated once at the edge (`config.load`).

Every field can be set in a file (``engine: {num_blocks: 512}``), by a variable
(``TANDEM_ENGINE__NUM_BLOCKS=512``) or by a command-line option, the later winning. Telemetry's
exporters are the exception: they obey the standard ``OTEL_*`` variables.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from tandem.config.choices import (
    DisaggregationMode,
    LogFormat,
    LogLevel,
    ModelDtype,
    TransportKind,
    WeightFormat,
)

DEFAULT_KV_MEMORY_BYTES = 1 << 30

Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
# Absolute, since a Ray actor starts in a folder of its own.
Folder = Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSettings(_Section):
    """What is served. `ref`: a Hugging Face folder, a ``.gguf`` file or an alias that Tandem knows."""

    ref: Annotated[str, Field(min_length=1)] = "smollm2-135m"
    served_name: str | None = None
    dtype: ModelDtype = ModelDtype.FLOAT32
    weights: WeightFormat = WeightFormat.FULL

    @property
    def name(self) -> str:
        """What clients call the model: `served_name`, or the last part of `ref` without ``.gguf``."""
        return self.served_name or Path(self.ref).name.removesuffix(".gguf")


class EngineSettings(_Section):
    """One worker's engine. Give `num_blocks` or `memory_bytes`; with neither, the KV pool takes 1 GiB."""

    num_blocks: Count | None = None
    memory_bytes: Count | None = None
    block_size_tokens: Annotated[int, Field(ge=1, le=1024)] = 16
    max_batch_tokens: Count = 512
    max_num_sequences: Count = 64
    max_waiting: Count = 256

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if self.num_blocks is not None and self.memory_bytes is not None:
            raise ValueError("give num_blocks or memory_bytes, not both")
        if self.max_batch_tokens < self.max_num_sequences:
            raise ValueError(
                f"max_batch_tokens ({self.max_batch_tokens}) must be at least "
                f"max_num_sequences ({self.max_num_sequences}): every running sequence takes a token a step"
            )
        return self

    def num_blocks_for(self, block_bytes: int) -> int:
        """Blocks of `block_bytes` that the KV pool gets; 0 when `memory_bytes` holds not one."""
        if self.num_blocks is not None:
            return self.num_blocks
        return (self.memory_bytes or DEFAULT_KV_MEMORY_BYTES) // block_bytes


class TransferSettings(_Section):
    """The KV plane. `lease_s` is the back-stop after which a silent sender's ticket is void."""

    transport: TransportKind = TransportKind.UCX
    lease_s: Seconds = 10.0
    handshake_timeout_s: Seconds = 5.0
    send_timeout_s: Seconds = 30.0


class DirectorySettings(_Section):
    """The state plane. Without `redis_url` the launcher starts its own Redis on a unix socket."""

    redis_url: SecretStr | None = None
    namespace: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")] = "tandem"
    ttl_s: Seconds = 5.0
    heartbeat_s: Seconds = 1.0
    command_timeout_s: Seconds = 0.5

    @field_validator("redis_url")
    @classmethod
    def _known_scheme(cls, url: SecretStr | None) -> SecretStr | None:
        # The message must not show the value: a password may be in it.
        if url is not None and urlsplit(url.get_secret_value()).scheme not in ("redis", "rediss", "unix"):
            raise ValueError("must start with redis://, rediss:// (TLS) or unix://")
        return url

    @model_validator(mode="after")
    def _beats_within_ttl(self) -> Self:
        if self.heartbeat_s * 2 > self.ttl_s:
            raise ValueError(
                f"ttl_s ({self.ttl_s:g}) must be at least twice heartbeat_s ({self.heartbeat_s:g}), "
                "or one late heartbeat takes a healthy worker away"
            )
        return self


class GatewaySettings(_Section):
    """The public end. `tenant_secret` salts prefix hashes; without it one is drawn at start-up."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Port = 50051
    max_prompt_bytes: Count = 16 << 20
    max_requests: Count = 1024
    disaggregation: DisaggregationMode = DisaggregationMode.AUTO
    reflection: bool = False
    tenant_secret: SecretStr | None = None
    drain_s: Seconds = 30.0


class WorkerSettings(_Section):
    """A worker's process. Port 0 takes a free one; no `num_threads` leaves torch's own choice."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    control_port: Port = 0
    num_threads: Count | None = None
    drain_s: Seconds = 30.0


class ClusterSettings(_Section):
    """What the launcher starts."""

    num_prefill: Annotated[int, Field(ge=0)] = 1
    num_decode: Count = 1
    start_timeout_s: Seconds = 120.0


class TelemetrySettings(_Section):
    """Logs, metrics (`metrics_port` None: off, 0: a free one) and the folder of span files."""

    metrics_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    metrics_port: Port | None = None
    log_format: LogFormat = LogFormat.CONSOLE
    log_level: LogLevel = LogLevel.INFO
    trace_dir: Folder | None = None


class Settings(_Section):
    """The whole tree."""

    model: ModelSettings = Field(default_factory=ModelSettings)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    transfer: TransferSettings = Field(default_factory=TransferSettings)
    directory: DirectorySettings = Field(default_factory=DirectorySettings)
    gateway: GatewaySettings = Field(default_factory=GatewaySettings)
    worker: WorkerSettings = Field(default_factory=WorkerSettings)
    cluster: ClusterSettings = Field(default_factory=ClusterSettings)
    telemetry: TelemetrySettings = Field(default_factory=TelemetrySettings)
