from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tandem.errors import PeerLost
from tandem.request import ChatMessage, Request
from tandem.telemetry.logs import fields, set_up_logging
from tandem.telemetry.spans import start_span, trace_id
from tandem.telemetry.tracing import Tracing

CANARY = "canary-4711"
log = logging.getLogger("tandem.test")
Logging = Callable[..., io.StringIO]


@pytest.fixture
def logging_to() -> Iterator[Logging]:
    restores: list[Callable[[], None]] = []

    def set_up(**options: Any) -> io.StringIO:
        stream = io.StringIO()
        restores.append(set_up_logging("gateway", stream=stream, **options))
        return stream

    yield set_up
    for restore in reversed(restores):
        restore()


def test_json_lines_hold_the_fields_and_the_trace(logging_to: Logging) -> None:
    stream = logging_to(as_json=True)
    tracing = Tracing("gateway", "one")
    with start_span(tracing.tracer, "work") as span:
        log.info("routed to %s", "decode-0", extra=fields(span, num_tokens=17, worker="decode-0"))
    tracing.shutdown()
    (entry,) = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert entry["message"] == "routed to decode-0"
    assert (entry["level"], entry["role"], entry["logger"]) == ("INFO", "gateway", "tandem.test")
    assert (entry["num_tokens"], entry["worker"]) == (17, "decode-0")
    assert entry["trace_id"] == trace_id(span)
    assert entry["time"].endswith("+00:00")


def test_a_console_line_holds_the_same(logging_to: Logging) -> None:
    stream = logging_to(as_json=False)
    log.warning("slow [bold]peer[/bold]", extra=fields(worker="decode-0"))
    (line,) = stream.getvalue().splitlines()
    assert "WARNING gateway slow [bold]peer[/bold] worker=decode-0" in line  # text, never markup


def test_levels_hold_for_ours_and_warnings_for_others(logging_to: Logging) -> None:
    stream = logging_to(as_json=True, level="DEBUG")
    log.debug("ours")
    logging.getLogger("someone.else").info("theirs")
    logging.getLogger("someone.else").warning("their warning")
    assert [json.loads(line)["message"] for line in stream.getvalue().splitlines()] == [
        "ours",
        "their warning",
    ]


@pytest.mark.parametrize("as_json", [True, False])
def test_p31_a_prompt_shows_in_no_log(logging_to: Logging, as_json: bool) -> None:
    stream = logging_to(as_json=as_json)
    request = Request(prompt=CANARY)
    log.info("got %s", request)
    log.info("got %(request)s of %(prompt)s", {"request": request, "prompt": CANARY})
    log.info("got one", extra=fields(request=request, prompt=CANARY, turn=ChatMessage("user", CANARY)))
    log.info("failed: %s", ValueError(CANARY))
    log.info("a plain message", extra=fields(message="a field of that name"))
    try:
        try:
            raise ValueError(f"template failed on {CANARY}")
        except ValueError as error:
            raise PeerLost("decode-0 is gone") from error
    except PeerLost:
        log.exception("request failed")
    text = stream.getvalue()
    assert CANARY not in text
    assert text.count("withheld") == 6
    assert "a plain message" in text
    assert "PeerLost: decode-0 is gone" in text
    assert "ValueError" in text
    assert "test_logs.py" in text


def test_restoring_puts_the_old_handlers_back() -> None:
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    restore = set_up_logging("gateway", stream=io.StringIO())
    assert root.handlers != before[0]
    restore()
    assert (root.handlers, root.level) == before
