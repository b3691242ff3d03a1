"""What both codecs are made of: enums side by side, and fields that refuse what they can't hold."""

from __future__ import annotations

from collections.abc import Iterable, MutableSequence
from enum import Enum
from typing import Any, Generic, TypeVar

from tandem.errors import InvalidRequest

_Domain = TypeVar("_Domain", bound=Enum)


class WireEnum(Generic[_Domain]):
    """One domain enum beside its wire enum. Zero (unspecified) is nobody's value.

    Wire names are the domain's with the prefix that protobuf style asks for.
    """

    def __init__(self, kind: type[_Domain], wire: Any, prefix: str) -> None:
        self._to_wire = {member: wire.Value(f"{prefix}_{member.name}") for member in kind}
        self._from_wire = {value: member for member, value in self._to_wire.items()}

    def encode(self, member: _Domain) -> Any:
        """The wire value."""
        return self._to_wire[member]

    def decode(self, value: int, field: str) -> _Domain:
        """The domain member; unspecified and unknown values are refused."""
        try:
            return self._from_wire[value]
        except KeyError:
            raise InvalidRequest(field, f"{int(value)} is not a value known here") from None


def set_field(message: Any, name: str, value: object, field: str) -> None:
    """Set a scalar; what its wire type can't hold is `InvalidRequest`, without the value: it may be text."""
    try:
        setattr(message, name, value)
    except (ValueError, TypeError):
        raise InvalidRequest(field, f"a value of type {type(value).__name__} does not fit here") from None


def extend_field(into: MutableSequence[Any], values: Iterable[object], field: str) -> None:
    """Append scalars; what the wire type can't hold is `InvalidRequest`, without the value."""
    try:
        into.extend(values)
    except (ValueError, TypeError):
        raise InvalidRequest(field, "holds a value that does not fit here") from None
