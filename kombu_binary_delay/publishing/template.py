"""Encode a kind of message once, and what differs from message to message a column at a time.

A program that publishes many messages of one kind, such as those of one Celery task to one queue,
has the same properties and headers in each but for a few values: ids, times, arguments. A
:class:`Template` is made from one such message. A :class:`Run` has further ones, which
:meth:`.PublishBatch.fill` publishes: byte for byte those that :meth:`.PublishBatch.publish` writes.
This module must not import anything of ours but the ladder's headers and :mod:`.frames`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.ladder.delay import EXPIRES, JITTER, KEY, REPLACES, X_DELAY
from kombu_binary_delay.ladder.envelope import (
    COPIES,
    DEATH_HEADERS,
    HEADER,
    HEADERS,
    OFFSET,
    is_expiration,
)
from kombu_binary_delay.ladder.returns import RETURNS

from .frames import PROPERTIES, counted, write_fields, write_name, write_short, write_value

EXPIRATION = "expiration"
#: The headers that say more of a message's way than when it is due, or of what it supersedes.
_OF_THE_WAY = frozenset(
    {X_DELAY, JITTER, EXPIRES, KEY, REPLACES, HEADER, OFFSET, RETURNS, *COPIES, *DEATH_HEADERS}
)
#: The encoding by which each byte is a letter.
_BYTES = "latin-1"
#: The type of a text in a table and its length, for the lengths below this one: also those of a
#: text that is a property.
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
        #: The headers that differ, each with the bytes before its value.
        self._slots: list[tuple[str, str]] = []
        same: dict[str, Any] = {}
        for name, value in self._headers.items():
            if name in varying:
                before_it = write_fields(same) + write_name(name)
                self._slots.append((str(before_it, _BYTES), name))
                same = {}
            else:
                same[name] = value
        #: The names of the headers that differ.
        self.varying = frozenset(name for _, name in self._slots)
        self._rest = str(write_fields(same), _BYTES)
        self._tail = str(write_fields(self._last), _BYTES)
        #: Whether its headers say nothing more of a message than when it is due.
        self.is_plain = _OF_THE_WAY.isdisjoint(headers) and EXPIRATION not in self._properties

    @property
    def has_last(self) -> bool:
        """Whether further headers are not the last."""
        return bool(self._last)

    def read(self, headers: Mapping[str, Any], properties: Mapping[str, Any]) -> dict[str, Any]:
        """Return the properties of a message, its headers among them."""
        return {
            **self._properties,
            **properties,
            HEADERS: {**self._headers, **headers, **self._last},
        }

    def encode(
        self,
        run: Run,
        part: slice,
        due: Sequence[int | None],
        further: Sequence[Mapping[str, Any]] | None,
    ) -> list[bytes]:
        """Return the flags and properties of messages as they are written.

        :param run: of this kind.
        :param part: which messages of it.
        :param due: of each of these, for the ladder's header, in milliseconds since the epoch,
            after January 1970; None if it does not wait.
        :param further: the headers that only the one message has; None if none has any.
        :raises LookupError, OverflowError, TypeError, ValueError: and the others of
            ``UNWRITABLE``, if AMQP cannot encode a value of one of them.
        """
        # As text, in which each byte is a letter: it is joined and measured in fewer steps.
        columns: list[Iterable[str]] = []
        encoded: dict[int, list[str]] = {}
        for before, name in self._slots:
            # Several headers can have the same values, as the ids of a task and of its root.
            values = run.headers[name]
            if (texts := encoded.get(id(values))) is None:
                texts = encoded[id(values)] = _fields(values[part])
            columns += (repeat(before), texts)
        if further is None:
            columns.append(repeat(self._rest + self._tail))
        else:
            own = [str(write_fields(row), _BYTES) for row in further]
            columns += (repeat(self._rest), own, repeat(self._tail))
        properties = {name: values[part] for name, values in run.properties.items()}
        expirations: Iterable[Any] = repeat(None)
        if EXPIRATION in properties:
            expirations = properties[EXPIRATION]
            # The ladder keeps it.
            stays = zip(expirations, due, strict=True)
            properties[EXPIRATION] = [text if moment is None else None for text, moment in stays]
        columns.append(list(map(_packed, due, expirations)))
        return self._with_properties(list(map("".join, zip(*columns, strict=False))), properties)

    def _with_properties(
        self, headers: list[str], properties: Mapping[str, Sequence[Any]]
    ) -> list[bytes]:
        """Return encoded headers with the other properties, of which some differ."""
        all_flags, absent, same = 0, [0] * len(headers), ""
        columns: list[Iterable[str]] = []
        for name, flag, write in PROPERTIES:
            if name == HEADERS:
                sizes = [str(len(text).to_bytes(4, "big"), _BYTES) for text in headers]
                columns += (repeat(same), sizes, headers)
            elif name in properties:
                values = properties[name]
                columns += (repeat(same), _texts(values, write))
                if None in values:
                    absent = [
                        flags | flag if value is None else flags
                        for flags, value in zip(absent, values, strict=True)
                    ]
            else:
                if (value := self._properties.get(name)) is not None:
                    all_flags |= flag
                    same += str(write(value), _BYTES)
                continue
            all_flags, same = all_flags | flag, ""
        flags = [str((all_flags & ~those).to_bytes(2, "big"), _BYTES) for those in absent]
        joined = map("".join, zip(flags, *columns, repeat(same), strict=False))
        return [text.encode(_BYTES) for text in joined]


class Run:
    """Messages of one kind that are published together, in their order, and the outcome of each.

    They must not change any more. All columns are as long as the bodies.

    :param due: when each is due, in microseconds since the epoch; None if it is not delayed. A
        header such as ``eta`` must say the same.
    :param headers: by the name of each header that differs, its value in each message.
    :param properties: the same of the properties that differ; None where a message has none.
    :param further: the headers that only the one message has; None if none has any.
    :raises ValueError: if a column is missing, unknown or of another length.
    """

    def __init__(  # noqa: PLR0913 - a column each
        self,
        template: Template,
        bodies: Sequence[bytes],
        due: Sequence[int | None],
        *,
        headers: Mapping[str, Sequence[Any]] | None = None,
        properties: Mapping[str, Sequence[Any]] | None = None,
        further: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self.template, self.bodies, self.due = template, bodies, due
        self.headers, self.properties, self.further = headers or {}, properties or {}, further
        if self.headers.keys() != template.varying:
            raise ValueError(
                f"headers must have what differs by the template, {sorted(template.varying)}, got "
                f"{sorted(self.headers)}"
            )
        columns = {"due": due, **self.headers, **self.properties}
        if further is not None:
            columns["further"] = further
        for name, values in columns.items():
            if len(values) != len(bodies):
                raise ValueError(f"{name} must have {len(bodies)} values, got {len(values)}")
        #: Of each message, the state of its outcome; None until that is known.
        self.states: list[str | None] = [None] * len(bodies)
        #: Of those that were not confirmed, by their places: the outcome's reply code and text.
        self.replies: dict[int, tuple[int, str]] = {}

    def read(self, place: int) -> dict[str, Any]:
        """Return the properties of one message, its headers among them."""
        headers = {name: values[place] for name, values in self.headers.items()}
        if self.further is not None:
            headers |= self.further[place]
        properties = {name: values[place] for name, values in self.properties.items()}
        for name in [name for name, value in properties.items() if value is None]:
            del properties[name]
        return self.template.read(headers, properties)

    @property
    def is_usual(self) -> bool:
        """Whether nothing of any message says more of its way than when it is due."""
        return self.template.is_plain and self.further is None and EXPIRATION not in self.properties

    def count_plain(self, part: slice, *, can_wait: bool) -> int:
        """Return of how many messages, the first ones of a part, the same is true.

        :param can_wait: whether it can be true of messages that are delayed.
        """
        count, expirations = 0, self.properties.get(EXPIRATION)
        for place in range(*part.indices(len(self.bodies))):
            if not self.template.is_plain or (
                self.further is not None and not _OF_THE_WAY.isdisjoint(self.further[place])
            ):
                break
            if self.due[place] is not None:
                expiration = expirations and expirations[place]
                if not can_wait or (expiration is not None and not is_expiration(expiration)):
                    break
            count += 1
        return count


def _fields(values: Sequence[Any]) -> list[str]:
    """Encode the values of a header."""
    return [
        _LENGTHS[len(value)] + value
        if value.__class__ is str and len(value) < _SHORT and value.isascii()
        else str(write_value(value), _BYTES)
        for value in values
    ]


def _texts(values: Sequence[Any], write: Callable[[Any], bytes]) -> list[str]:
    """Encode the values of a property."""
    if write is not write_short:
        return ["" if value is None else str(write(value), _BYTES) for value in values]
    return [
        chr(len(value)) + value
        if value.__class__ is str and len(value) < _SHORT and value.isascii()
        else ("" if value is None else str(write(value), _BYTES))
        for value in values
    ]


def _packed(due: int | None, expiration: Any) -> str:
    """Encode the ladder's header."""
    if due is None:
        return ""
    if expiration is None:
        return _DUE + str(write_value(due), _BYTES)
    packed = {"due": due, EXPIRATION: expiration}
    return _PACKED + str(counted(write_fields(packed)), _BYTES)
