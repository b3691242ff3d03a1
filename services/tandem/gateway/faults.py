"""Whose fault a failure is: only a worker's is worth a second try, on another worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tandem.directory.base import WorkerRecord
from tandem.errors import (
    DeadlineExceeded,
    InvalidRequest,
    MessageTooLarge,
    TandemError,
    Unavailable,
    UnknownModel,
)
from tandem.generation import DEADLINE_ERROR, SequenceOutput
from tandem.request import FinishReason

_THE_REQUESTS_OWN = (InvalidRequest, UnknownModel, MessageTooLarge, DeadlineExceeded)


class WorkerFault(Exception):
    """A worker failed an attempt that another one may do. Never leaves the dispatcher."""

    def __init__(self, worker: WorkerRecord, error: TandemError) -> None:
        super().__init__(str(error))
        self.worker = worker
        self.error = error


@contextmanager
def blaming(worker: WorkerRecord) -> Iterator[None]:
    """What goes wrong in the block is this worker's fault, unless it is the request's."""
    try:
        yield
    except _THE_REQUESTS_OWN:
        raise
    except TandemError as error:
        raise WorkerFault(worker, error) from error


def checked(output: SequenceOutput) -> SequenceOutput:
    """The output itself; raises what it reports. Only for a sequence that nobody here cancelled."""
    if output.finish is FinishReason.ERROR:
        if output.error == DEADLINE_ERROR:
            raise deadline_exceeded()
        raise Unavailable(output.error or "the worker failed without a reason; see its log")
    if output.finish is FinishReason.CANCELLED:
        raise Unavailable("the worker aborted the sequence; a retry may succeed")
    return output


def deadline_exceeded() -> DeadlineExceeded:
    """What the caller is told whose time is up."""
    return DeadlineExceeded(
        "the deadline passed before the answer was complete; allow more time or fewer tokens"
    )
