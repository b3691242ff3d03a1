"""Races told as text: a side, then ``event -> state: effects`` a line. What can't be parsed fails."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tandem.transfer.handoff import RECEIVER, SENDER, ReceiverEvent, SenderEvent

SIDES = {"receiver": (RECEIVER, ReceiverEvent), "sender": (SENDER, SenderEvent)}
LINE = re.compile(r"([a-z ]+) -> ([a-z]+)(?:: ([a-z]+(?:[ ,a-z]+)?))?")


def play(text: str) -> None:
    side, *lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    table, events = SIDES[side]
    state = table.start
    assert lines, "a transcript without events tells nothing"
    for line in lines:
        parsed = LINE.fullmatch(line)
        if parsed is None:
            raise ValueError(f"can't parse {line!r}")
        state, effects = table.step(state, events(parsed[1]))
        told = ", ".join(effect.value for effect in effects)
        assert (state.value, told) == (parsed[2], parsed[3] or ""), line


@pytest.mark.parametrize("path", sorted(Path(__file__).parent.glob("*.txt")), ids=lambda path: path.stem)
def test_transcript(path: Path) -> None:
    play(path.read_text())


@pytest.mark.parametrize(
    "line", ["word ok", "word ok => landing", "no such event -> open", "Word ok -> landing"]
)
def test_what_cannot_be_parsed_is_rejected(line: str) -> None:
    with pytest.raises(ValueError, match=r"can't parse|not a valid"):
        play(f"receiver\n{line}\n")
