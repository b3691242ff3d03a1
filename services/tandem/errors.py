"""Every error Tandem raises on purpose. Each says what was wrong and the cure.

    TandemError
    ├── InvalidRequest          the caller's fault; names the field            INVALID_ARGUMENT
    ├── UnknownModel            no such model here                             NOT_FOUND
    ├── Overloaded              full: come back after `retry_after_s`          RESOURCE_EXHAUSTED
    │   └── OutOfBlocks         one worker's KV pool has no free block
    ├── MessageTooLarge         passes the size bound; a retry won't help      RESOURCE_EXHAUSTED
    ├── Unavailable             nobody can serve this now                      UNAVAILABLE
    │   ├── NoWorker            the pool has no ready worker
    │   ├── PeerLost            a worker died, hung or closed the connection
    │   └── Draining            this process takes no new work
    ├── DeadlineExceeded        the caller's time is up                        DEADLINE_EXCEEDED
    ├── Cancelled               the caller went away                           CANCELLED
    ├── Refused                 a peer must not do this                        FAILED_PRECONDITION
    │   ├── LayoutMismatch      other model, dtype, block size or version
    │   ├── TicketRefused       unknown, used, expired or forged ticket
    │   ├── Fenced              a newer life of this worker is known
    │   └── OutOfSequence       a batch of index events is missing: clear and republish
    ├── TransferFailed          KV bytes did not arrive, or arrived wrong      UNAVAILABLE
    ├── ModelLoadError          the model's files can't be used                FAILED_PRECONDITION
    ├── ConfigError             a setting is wrong; names it                   FAILED_PRECONDITION
    └── InternalError           a bug of ours                                  INTERNAL

Foreign exceptions are mapped to one of these at the boundary where they appear.
"""

from __future__ import annotations


class TandemError(Exception):
    """Base of all errors. `str(error)` is safe to show: it never holds prompt text."""


class InvalidRequest(TandemError):
    """A request breaks a rule. `field` is the name the user wrote, e.g. ``sampling.top_p``."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class UnknownModel(TandemError):
    """The named model is not served here."""


class Overloaded(TandemError):
    """No room now. `retry_after_s` is an honest guess at when there will be."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class OutOfBlocks(Overloaded):
    """A KV pool lacks `wanted` free blocks."""

    def __init__(self, *, wanted: int, free: int, retry_after_s: float = 1.0) -> None:
        super().__init__(
            f"the KV pool has {free} free blocks and {wanted} are needed; "
            "retry later, or raise engine.num_blocks",
            retry_after_s=retry_after_s,
        )
        self.wanted = wanted
        self.free = free


class MessageTooLarge(TandemError):
    """A request or answer passes the bound on message sizes; sending it again won't help."""


class Unavailable(TandemError):
    """Nobody can serve this now; a retry elsewhere or later may succeed."""


class NoWorker(Unavailable):
    """A pool has no ready worker."""


class PeerLost(Unavailable):
    """A worker died, hung past its deadline, or closed the connection."""


class Draining(Unavailable):
    """This process is shutting down and takes no new work."""


class DeadlineExceeded(TandemError):
    """The caller's deadline passed before the work was done."""


class Cancelled(TandemError):
    """The caller went away."""


class Refused(TandemError):
    """A peer asked for something it must not have; nothing was moved."""


class LayoutMismatch(Refused):
    """The peers' KV layouts differ (model revision, dtype, block size, version)."""


class TicketRefused(Refused):
    """The ticket is unknown, used, expired, or not for this peer."""


class Fenced(Refused):
    """A newer life of this worker has registered: this process must stop speaking for it."""


class OutOfSequence(Refused):
    """The index lacks what came before this batch (lost, purged, or no lease): clear and republish."""


class TransferFailed(TandemError):
    """KV blocks did not arrive whole; nothing was made of them."""


class ModelLoadError(TandemError):
    """A model's files are missing, damaged or of an unsupported kind."""


class ConfigError(TandemError):
    """A setting is wrong; the message names it and what it may be."""


class InternalError(TandemError):
    """A bug of ours: please report it with the trace id."""
