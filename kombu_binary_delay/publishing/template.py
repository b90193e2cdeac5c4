"""Encode a kind of message once, and join what differs from message to message as bytes.

A program that publishes many messages of one kind, such as those of one Celery task to one queue,
has the same properties and headers in each but for a few values: ids, times, arguments. A
:class:`Template` is made from one such message. :meth:`.PublishBatch.fill` publishes further ones,
many at once, which are byte for byte those that :meth:`.PublishBatch.publish` writes. This module
must not import anything of ours but the ladder's headers and :mod:`.frames`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.ladder.delay import EXPIRES, JITTER, KEY, REPLACES, X_DELAY
from kombu_binary_delay.ladder.envelope import COPIES, DEATH_HEADERS, HEADER, HEADERS, OFFSET
from kombu_binary_delay.ladder.returns import RETURNS

from .frames import PROPERTIES, counted, write_fields, write_name, write_value

EXPIRATION = "expiration"
#: The headers that say more of a message's way than when it is due, or of what it supersedes.
_OF_THE_WAY = frozenset(
    {X_DELAY, JITTER, EXPIRES, KEY, REPLACES, HEADER, OFFSET, RETURNS, *COPIES, *DEATH_HEADERS}
)
#: The encoding by which each byte is a letter.
_BYTES = "latin-1"
#: The type of a text in a table and its length, for the lengths below this one.
_SHORT = 256
_LENGTHS = [str(write_value("x" * length)[:5], _BYTES) for length in range(_SHORT)]
#: The ladder's header, and its due time up to the value, which takes 8 bytes and a type.
_PACKED = str(write_name(HEADER) + b"F", _BYTES)
_DUE = _PACKED + str((4 + 9).to_bytes(4, "big") + write_name("due"), _BYTES)


class Template:
    """A kind of message.

    :param properties: those of one message of the kind, by py-amqp's names.
    :param destination: the exchange and the routing key of all of them.
    :param varying: the headers whose values differ. A message can have further headers.
    :param before: the header before which the further ones come; by default, they are the last.
    """

    def __init__(
        self,
        properties: Mapping[str, Any],
        destination: tuple[str, str],
        varying: Collection[str],
        before: str | None = None,
    ) -> None:
        self.destination = Destination(*destination)
        self._properties = {name: properties[name] for name in properties if name != HEADERS}
        #: The priority of all messages of the kind.
        self.priority = self._properties.get("priority")
        headers = dict(properties.get(HEADERS) or {})
        names = [*headers]
        end = names.index(before) if before in headers else len(names)
        self._headers = {name: headers[name] for name in names[:end]}
        self._last = {name: headers[name] for name in names[end:]}
        self._varying = tuple(name for name in names[:end] if name in varying)
        #: The headers that differ, each with the bytes before its value.
        self._slots: list[tuple[str, str]] = []
        same: dict[str, Any] = {}
        for name, value in self._headers.items():
            if name in self._varying:
                before_it = write_fields(same) + write_name(name)
                self._slots.append((str(before_it, _BYTES), name))
                same = {}
            else:
                same[name] = value
        self._rest = str(write_fields(same), _BYTES)
        self._tail = str(write_fields(self._last), _BYTES)
        self._is_plain = _OF_THE_WAY.isdisjoint(headers) and EXPIRATION not in self._properties
        #: By the names of the properties that differ, what encodes them with the others.
        self._encoders: dict[tuple[str, ...], Callable[[bytes, Mapping[str, Any]], bytes]] = {}

    @property
    def has_last(self) -> bool:
        """Whether further headers are not the last."""
        return bool(self._last)

    def can_encode(self, headers: Mapping[str, Any]) -> bool:
        """Return whether these headers say nothing more of a message than when it is due."""
        return self._is_plain and _OF_THE_WAY.isdisjoint(headers)

    def is_usual(self, headers: Mapping[str, Any]) -> bool:
        """Return whether these are the headers that differ, and the others leave its way alone."""
        return self._is_plain and len(headers) == len(self._slots)

    def read(self, headers: Mapping[str, Any], properties: Mapping[str, Any]) -> dict[str, Any]:
        """Return the properties of a message, its headers among them."""
        return {
            **self._properties,
            **properties,
            HEADERS: {**self._headers, **headers, **self._last},
        }

    def encode(
        self,
        headers: Mapping[str, Any],
        properties: Mapping[str, Any],
        due: int | None = None,
    ) -> bytes:
        """Return the flags and properties of a message as they are written.

        :param due: for the ladder's header, in milliseconds since the epoch, after January 1970;
            None if the message does not wait.
        """
        # As text, in which each byte is a letter: it is joined and measured in fewer steps.
        parts: list[str] = []
        for before, name in self._slots:
            value = headers[name]
            if value.__class__ is str and len(value) < _SHORT and value.isascii():
                parts += (before, _LENGTHS[len(value)], value)
            elif value is None:
                parts += (before, "V")
            else:
                parts += (before, str(write_value(value), _BYTES))
        parts.append(self._rest)
        if len(headers) > len(self._slots):
            further = {name: headers[name] for name in headers if name not in self._varying}
            parts.append(str(write_fields(further), _BYTES))
        parts.append(self._tail)
        names = tuple(properties)
        if due is not None:
            if EXPIRATION in names:
                # The ladder keeps it.
                names = tuple(name for name in names if name != EXPIRATION)
                packed = {"due": due, EXPIRATION: properties[EXPIRATION]}
                parts.append(_PACKED + str(counted(write_fields(packed)), _BYTES))
            else:
                parts += (_DUE, str(write_value(due), _BYTES))
        encode = self._encoders.get(names)
        if encode is None:
            encode = self._encoders[names] = _encoder(self._properties, names)
        return encode("".join(parts).encode(_BYTES), properties)


#: A message of a kind: the template, the body, the headers that differ and further ones, the
#: properties that differ, and when it is due, in microseconds since the epoch; None if it is not
#: delayed. A header such as ``eta`` must say the same.
OfKind = tuple[Template, bytes, dict[str, Any], dict[str, Any], int | None]


class Run:
    """Messages of kinds that are published together, in their order, and the outcome of each.

    :param messages: they must not change any more.
    """

    def __init__(self, messages: Sequence[OfKind]) -> None:
        self.messages = messages
        #: Of each message, the state of its outcome; None until that is known.
        self.states: list[str | None] = [None] * len(messages)
        #: Of those that were not confirmed, by their places: the outcome's reply code and text.
        self.replies: dict[int, tuple[int, str]] = {}


def _encoder(
    properties: Mapping[str, Any], names: tuple[str, ...]
) -> Callable[[bytes, Mapping[str, Any]], bytes]:
    """Return what joins encoded headers and the properties of some names with the others."""
    flags, same = 0, b""
    parts: list[bytes] = []
    #: What encodes each property that differs, and where it comes.
    writes: list[tuple[int, str, Callable[[Any], bytes]]] = []
    for name, flag, write in PROPERTIES:
        if name == HEADERS or name in names:
            parts += (same, b"")
            same = b""
            flags |= flag
            if name == HEADERS:
                at = len(parts)
            else:
                writes.append((len(parts), name, write))
        elif properties.get(name) is not None:
            same += write(properties[name])
            flags |= flag
    parts = [flags.to_bytes(2, "big"), *parts, same]

    if len(writes) == 1 and writes[0][0] > at:
        [(place, only, write_one)] = writes
        first, middle, last = (
            b"".join(part) for part in (parts[:at], parts[at + 1 : place], parts[place + 1 :])
        )

        def encode_one(fields: bytes, filled: Mapping[str, Any]) -> bytes:
            size = len(fields).to_bytes(4, "big")
            return b"".join((first, size, fields, middle, write_one(filled[only]), last))

        return encode_one

    def encode(fields: bytes, filled: Mapping[str, Any]) -> bytes:
        pieces = parts.copy()
        pieces[at] = counted(fields)
        for place, name, write in writes:
            pieces[place] = write(filled[name])
        return b"".join(pieces)

    return encode
