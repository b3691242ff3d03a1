"""From one choice's tokens to the text its client sees, with stop strings.

The answer depends on the tokens only, never on how they were cut into messages: a stop string is
searched character by character with one automaton for all of them (Aho & Corasick 1975), so of
several the one that is complete first ends the text, and of those that end together the longest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.generation import TokenOutput
from tandem.model.detokenizer import IncrementalDetokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What a push brought: text that is now certain, and how many of the pushed tokens count.

    `stopped`: a stop string is complete. Its last token counts, later ones don't; the stop string
    is not in any text, and the assembler takes no more.
    """

    text: str
    num_tokens_kept: int
    stopped: bool


class TextAssembler:
    """The text of one choice. Text is held back only while it may still become a stop string."""

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer,
        stop: tuple[str, ...] = (),
        min_tokens: int = 0,
        hidden_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """A stop string counts only if a token after the first `min_tokens` completes it.

        `hidden_token_ids` add no text: ids that end a sequence (stop ids), special or not.
        """
        self._detokenizer = detokenizer
        self._matcher = _StopMatcher(stop) if stop else None
        self._min_tokens = min_tokens
        self._hidden = hidden_token_ids
        self._num_tokens = 0
        self._stopped = False

    def push(self, tokens: Sequence[TokenOutput]) -> TextDelta:
        """Take the next tokens, in order. After a stop: nothing, `num_tokens_kept` 0."""
        if self._stopped:
            return TextDelta("", 0, stopped=True)
        if self._matcher is None:
            self._num_tokens += len(tokens)
            shown = [token.token_id for token in tokens if token.token_id not in self._hidden]
            return TextDelta(self._detokenizer.push(shown), len(tokens), stopped=False)
        parts = []
        for count, token in enumerate(tokens, start=1):
            self._num_tokens += 1
            if token.token_id in self._hidden:
                continue
            parts.append(self._match(self._detokenizer.push((token.token_id,))))
            if self._stopped:
                return TextDelta("".join(parts), count, stopped=True)
        return TextDelta("".join(parts), len(tokens), stopped=False)

    def finish(self) -> str:
        """The rest of the text, when the sequence has ended: nothing is held back any more.

        Empty after a stop, and on a second call.
        """
        if self._stopped:
            return ""
        rest = self._detokenizer.flush()
        if self._matcher is None:
            return rest
        rest = self._match(rest)
        return rest if self._stopped else rest + self._matcher.release()

    def _match(self, text: str) -> str:
        """What of `text` and the text held back is certain now; notes a stop."""
        if self._matcher is None:
            return text
        certain, self._stopped = self._matcher.push(text, may_stop=self._num_tokens > self._min_tokens)
        return certain


@dataclass(slots=True)
class _Node:
    """A state: the text ends with this node's path, and with no longer path of the trie."""

    children: dict[str, _Node] = field(default_factory=dict)
    fallback: _Node | None = None
    """The longest proper suffix of the path that is a path too; None at the root."""
    num_held: int = 0
    """Characters at the end of the text that may be the start of a stop string yet to be completed."""
    num_matched: int = 0
    """Characters of the longest stop string that the text ends with."""


class _StopMatcher:
    """Finds the first stop string in a stream of text. Constant cost per character."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._root = _build(stop)
        self._state = self._root
        self._held = ""

    def push(self, text: str, *, may_stop: bool) -> tuple[str, bool]:
        """The text that is certain now, and whether a stop string ended it. Mutates."""
        root = self._root
        if self._state is root and root.children.keys().isdisjoint(text):
            return text, False
        whole = self._held + text
        state = self._state
        for end, char in enumerate(text, start=len(self._held) + 1):
            state = _next(state, char)
            if may_stop and state.num_matched:
                self._state, self._held = root, ""
                return whole[: end - state.num_matched], True
        self._state = state
        certain = len(whole) - state.num_held
        self._held = whole[certain:]
        return whole[:certain], False

    def release(self) -> str:
        """What is held back, when no more text will come. Mutates."""
        held, self._held, self._state = self._held, "", self._root
        return held


def _next(state: _Node, char: str) -> _Node:
    node: _Node | None = state
    while node is not None:
        child = node.children.get(char)
        if child is not None:
            return child
        if node.fallback is None:
            return node
        node = node.fallback
    raise AssertionError("the root has no fallback, and ends the loop")


def _build(stop: tuple[str, ...]) -> _Node:
    """The automaton's root. Nodes are finished in breadth-first order: fallbacks lie nearer the root."""
    root = _Node()
    for text in stop:
        node = root
        for char in text:
            node = node.children.setdefault(char, _Node())
        node.num_matched = len(text)
    waiting = deque((child, char, root, 1) for char, child in root.children.items())
    while waiting:
        node, char, parent, depth = waiting.popleft()
        node.fallback = root if parent is root else _next(parent.fallback or root, char)
        node.num_held = depth if node.children else node.fallback.num_held
        node.num_matched = node.num_matched or node.fallback.num_matched
        waiting.extend((child, c, node, depth + 1) for c, child in node.children.items())
    return root
