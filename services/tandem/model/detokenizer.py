"""From token ids to text, whole characters at a time, at a constant cost per token.

Each token stands for some bytes, whatever comes before it (`TokenBytes` reads them off the decoder
that the tokenizer's file describes), and an incremental UTF-8 decoder holds back the bytes of an
unfinished character. So nothing is ever decoded twice, no window has to be guessed, and text in
parts equals text at once by construction.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from tandem.errors import ModelLoadError

_KNOWN = re.compile("(ByteLevel |Metaspace |(Replace )*(ByteFallback )?(Fuse (Strip )?)?)?")
"""The decoders that work token by token, as the words of one line: all that decoder-only models use."""
_EACH_BYTE = "tandem_replace_each_byte"
_MAX_CHAR_BYTES = 4


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return alphabet | {chr(256 + n): byte for n, byte in enumerate(hidden)}


_BYTE_OF = _byte_level_alphabet()


class TokenBytes:
    """The bytes each token of one tokenizer stands for. Shared by all streams; fills as it is used.

    `errors` names how broken UTF-8 shows (as the tokenizer's own decoder does it), `lead` a
    character that is dropped, once, from the start of a text that has no prompt before it.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Raises `ModelLoadError` for a kind of decoder that isn't known here."""
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._byte_level = self._byte_fallback = False
        self._replace: list[tuple[str, str]] = []
        self._metaspace: str | None = None
        self._drops_first_metaspace = False
        self.lead: str | None = None
        spec = json.loads(tokenizer.to_str())["decoder"]
        steps = [] if spec is None else spec["decoders"] if spec["type"] == "Sequence" else [spec]
        kinds = " ".join(step["type"] for step in steps)
        if _KNOWN.fullmatch(f"{kinds} " if steps else "") is None:
            raise _unknown(kinds)
        for step in steps:
            self._read(step)
        self._join_with_spaces = not steps
        self.errors = _EACH_BYTE if self._byte_fallback else "replace"
        self._bytes: dict[int, bytes] = {}

    def _read(self, step: Mapping[str, Any]) -> None:
        kind = step["type"]
        if kind == "ByteLevel":
            self._byte_level = True
        elif kind == "ByteFallback":
            self._byte_fallback = True
        elif kind == "Metaspace":
            self._metaspace = step["replacement"]
            self._drops_first_metaspace = step["prepend_scheme"] != "never"
        elif kind == "Replace":
            if "String" not in step["pattern"]:
                raise _unknown("Replace by a regular expression")
            self._replace.append((step["pattern"]["String"], step["content"]))
        elif kind == "Strip":
            if step["start"] > 1 or step["stop"] > 0:
                raise _unknown("Strip of more than one leading character")
            self.lead = step["content"] if step["start"] else None

    def __getitem__(self, token_id: int) -> bytes:
        """The token's bytes after other text; empty for an id that no token has."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._bytes_of(token_id, first=False)
        return found

    def at_start(self, token_id: int) -> bytes:
        """The token's bytes as the very first of a text."""
        return self._bytes_of(token_id, first=True)

    def _bytes_of(self, token_id: int, *, first: bool) -> bytes:
        token = self._tokenizer.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if self._byte_level:
            # A token with any character outside the alphabet (an added one) stands for itself.
            known = [_BYTE_OF[char] for char in token if char in _BYTE_OF]
            return bytes(known) if len(known) == len(token) else token.encode()
        for old, new in self._replace:
            token = token.replace(old, new)
        if self._metaspace is not None:
            dropped = first and self._drops_first_metaspace
            token = token.replace(self._metaspace, "" if dropped else " ")
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                return token.encode()
        return (" " + token if self._join_with_spaces and not first else token).encode()


def _unknown(what: str) -> ModelLoadError:
    return ModelLoadError(
        f"the tokenizer decodes by {what}, which is not supported; supported are ByteLevel, Metaspace, and "
        "Replace, ByteFallback, Fuse, Strip in this order"
    )


class IncrementalDetokenizer:
    """The text of one growing sequence. Joined, its parts are the text of all tokens at once.

    A character comes out with its last byte. U+FFFD comes out only for bytes that no later token
    can complete, as a decode at once shows them too. (One difference from the `tokenizers` library:
    it voids a whole run of byte-fallback tokens if any byte in it is broken; characters already
    complete stay valid here.)
    """

    def __init__(
        self, pieces: TokenBytes, prompt_tail: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        """`prompt_tail`: the prompt's tokens, or some last ones; they yield no text of their own.

        With them, text starts as it would behind the prompt: a leading space stays, and a character
        that the prompt leaves unfinished is finished.
        """
        self._pieces = pieces
        self._skip = pieces.special_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")(pieces.errors)
        self._first_token = self._first_char = True
        self.push(prompt_tail[-_MAX_CHAR_BYTES:])
        if prompt_tail:
            self._first_token = self._first_char = False

    def push(self, token_ids: Iterable[int]) -> str:
        """The characters that these tokens complete; often empty within one."""
        data = b""
        for token_id in token_ids:
            if token_id in self._skip:
                continue
            if self._first_token:
                self._first_token = False
                data += self._pieces.at_start(token_id)
            else:
                data += self._pieces[token_id]
        return self._strip(self._decoder.decode(data))

    def flush(self) -> str:
        """What an unfinished last character shows as, at the end of the sequence."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if self._first_char and text:
            self._first_char = False
            if text[0] == self._pieces.lead:
                return text[1:]
        return text
