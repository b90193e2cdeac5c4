"""Send on what is parked: to where it was meant to go, or elsewhere, or into a file and back."""

from __future__ import annotations

import base64
import errno
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from decimal import Decimal
from typing import IO, Any

import amqp
from amqp.exceptions import NotFound

from kombu_binary_delay.batching.batch import CONFIRMED, Outcome, PublishBatch
from kombu_binary_delay.errors import AddressError, UnconfirmedError
from kombu_binary_delay.model.address import Destination
from kombu_binary_delay.model.envelope import HEADER, carried, unwrap
from kombu_binary_delay.model.topology import Topology

from .errors import OperationError, UnreachableError
from .management import Management
from .mover import (
    Acks,
    Keep,
    Progress,
    Pump,
    Send,
    bearable,
    deliveries,
    nothing,
    renewed,
)
from .snapshot import ready

_HEADERS = "application_headers"
_UNREADABLE = Destination("", "")
_NOT_DUE = "not due yet: parked when a part of the ladder was missing; redrive it when it is due"


@dataclass(frozen=True)
class Parked:
    """Messages for one destination, and what became of them: sent on, or still parked."""

    destination: Destination
    sent: int
    stays: int


@dataclass(frozen=True)
class Redrive:
    """By destination, the most messages first. ``unreadable`` ones have no address."""

    parked: tuple[Parked, ...]
    unreadable: int
    reasons: tuple[str, ...]

    @property
    def sent(self) -> int:
        """How many messages were sent on."""
        return sum(each.sent for each in self.parked)

    @property
    def stays(self) -> int:
        """How many messages are still parked."""
        return sum(each.stays for each in self.parked) + self.unreadable


def redrive(  # noqa: PLR0913 - which, and where to
    connect: Callable[[], Any],
    topology: Topology,
    management: Management | None = None,
    *,
    only: Destination | None = None,
    to: Destination | None = None,
    file: IO[str] | None = None,
    dry_run: bool = False,
    progress: Progress = nothing,
) -> Redrive:
    """Send parked messages on, confirmed before they leave the parking queue.

    What finds no queue stays parked, and so does what is not due yet.

    :param connect: connects to the broker, by Kombu's own transport.
    :param management: tells the parking queue's delivery limit. Without it, or its answer, what
        stays parked is published anew each second time that it is looked at.
    :param only: only messages for this destination.
    :param to: send them here, not to where they were meant to go.
    :param file: write them here, one line of JSON each, and not to the broker.
    :param dry_run: only count; each message is looked at and goes back.
    :raises OperationError: where there is no parking queue.
    """
    with connect() as taking, connect() as sending, connect() as asking:
        count = ready(asking, [topology.parking]).get(topology.parking)
        if count is None:
            raise OperationError(
                f"there is no parking queue {topology.parking!r} in this virtual host"
            )
        sorter = _Sorter(topology, asking, only, to, dry_run=dry_run)
        if file is not None and not dry_run:
            many = _many(topology.parking, management)
            _to_file(taking, asking, topology, sorter, file, count, many, progress)
        elif count:
            pump = Pump(taking, asking, sending)
            pump.run(
                topology.parking,
                sorter.decide,
                again=sorter.again,
                many=_many(topology.parking, management),
                limit=count,
                progress=progress,
            )
            pump.close()
            sorter.take(pump)
    return sorter.result()


def _many(parking: str, management: Management | None) -> int:
    """Tell how often a parked message may come back before it is to be parked anew."""
    if management is None:
        return 1
    try:
        row = management.get("queues", management.vhost, parking)
    except UnreachableError:
        # As if the limit were the lowest there can be.
        return 1
    return bearable(parking, row)


@dataclass(frozen=True)
class Refill:
    """How many messages were sent from a file; ``left`` could not be, for ``reasons``."""

    sent: int
    left: int = 0
    reasons: tuple[str, ...] = ()


def refill(
    connection: Any,
    file: IO[str],
    to: Destination | None = None,
    *,
    left: Callable[[str], object] = str,
) -> Refill:
    """Publish what :func:`redrive` wrote into a file, after all of it has been looked at.

    :param file: is read twice.
    :param to: send them here, not to where they were meant to go.
    :param left: is called with each line that was not confirmed, also where it is interrupted: to
        send these again, and not all, doubles nothing that was.
    :raises OperationError: where a line cannot be read; then nothing was sent.
    :raises UnreachableError: where the broker went away.
    """
    if not file.seekable():
        raise OperationError("what is sent from a file is read twice: write it into a file first")
    start = file.tell()
    _look_at(file)
    file.seek(start)
    lines = _lines(file)
    refilling = _Refilling(left)
    try:
        refilling.send(connection, lines, to)
    except BaseException as exc:
        refilling.stop(lines)
        if isinstance(exc, UnconfirmedError):
            raise UnreachableError(
                f"the broker went away, or refused to go on, when {refilling.sent} messages were "
                f"sent: {exc.__cause__ or exc}"
            ) from exc
        raise
    most = tuple(reason for reason, _ in refilling.reasons.most_common(5))
    return Refill(refilling.sent, sum(refilling.reasons.values()), most)


class _Refilling:
    """Knows of each line whether it was sent, and hands on those that were not."""

    def __init__(self, left: Callable[[str], object]) -> None:
        self._left = left
        self._pending: dict[int, str] = {}
        self.sent = 0
        self.reasons: Counter[str] = Counter()

    def send(
        self, connection: Any, lines: Iterator[tuple[int, str]], to: Destination | None
    ) -> None:
        standing = {"": True}
        with PublishBatch(connection.channel(), on_outcome=self._settled) as batch:
            for number, line in lines:
                self._pending[number] = line
                destination, message = load(line)
                place = to or destination
                if _stands(connection, place.exchange, standing):
                    key = place.routing_key
                    batch.publish(message, place.exchange, key, mandatory=True, tag=number)
                else:
                    self._failed(number, f"there is no exchange {place.exchange!r}")

    def stop(self, lines: Iterator[tuple[int, str]]) -> None:
        for line in self._pending.values():
            self._left(line)
        for _, line in lines:
            self._left(line)

    def _settled(self, outcome: Outcome) -> None:
        if outcome.state == CONFIRMED:
            del self._pending[outcome.tag]
            self.sent += 1
        else:
            self._failed(outcome.tag, f"{outcome.state}: {outcome.reply_text}")

    def _failed(self, number: int, why: str) -> None:
        self._left(self._pending.pop(number))
        self.reasons[why] += 1


def _look_at(file: IO[str]) -> None:
    number = 0
    try:
        for number, line in _lines(file):  # noqa: B007 - an error names it
            load(line)
    except UnicodeDecodeError as exc:
        raise OperationError(f"the file is not what redrive writes: {exc}") from exc
    except (ValueError, KeyError, TypeError, ArithmeticError) as exc:
        raise OperationError(f"line {number} is not what redrive writes: {exc!r}") from exc


def _lines(file: IO[str]) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(file, start=1) if line.strip())


class _Sorter:
    """Reads parked messages, decides where each goes, and counts."""

    def __init__(
        self,
        topology: Topology,
        asking: Any,
        only: Destination | None,
        to: Destination | None,
        *,
        dry_run: bool,
    ) -> None:
        self._topology, self._asking = topology, asking
        self._only, self._to, self._dry_run = only, to, dry_run
        self._standing = {"": True}
        self._seen: Counter[Destination] = Counter()
        self._sent: Counter[Destination] = Counter()
        self._reasons: Counter[str] = Counter()

    def decide(self, message: Any) -> Send | Keep:
        destination, unpacked = self.read(message)
        if not self.wants(destination):
            return Keep("kept")
        if self.is_early(message):
            return Keep("left", _NOT_DUE)
        if self._dry_run:
            return Keep("kept")
        place = self._to or destination
        if not _stands(self._asking, place.exchange, self._standing):
            return Keep("left", f"there is no exchange {place.exchange!r}")
        name = json.dumps([destination.exchange, destination.routing_key])
        return Send(unpacked, place.exchange, place.routing_key, name, mandatory=True)

    def again(self, message: Any, count: str) -> Send:
        """Park a message anew: the parking exchange leads there whatever the routing key."""
        key = message.delivery_info["routing_key"]
        return Send(renewed(message), self._topology.parking, key, count)

    def read(self, message: Any) -> tuple[Destination, Any]:
        """Tell where a message was meant to go, and how it was then."""
        properties = dict(message.properties)
        headers = properties[_HEADERS] = dict(properties.get(_HEADERS) or {})
        try:
            key = message.delivery_info["routing_key"]
            destination = self._topology.destination(key, carried(headers))
        except AddressError:
            return _UNREADABLE, message
        unwrap(properties, self._topology.owns)
        headers.pop("x-delivery-count", None)
        return destination, amqp.Message(message.body, **properties)

    def is_early(self, message: Any) -> bool:
        """Tell whether a message is not due yet, and would be early wherever it went."""
        packed = (message.properties.get(_HEADERS) or {}).get(HEADER)
        due = packed.get("due") if isinstance(packed, dict) else None
        return isinstance(due, int) and due > time.time_ns() // 1_000_000

    def stays(self, reason: str) -> None:
        self._reasons[reason] += 1

    def wants(self, destination: Destination) -> bool:
        """Tell whether messages for a destination are asked for, and count one."""
        self._seen[destination] += 1
        return destination != _UNREADABLE and self._only in (None, destination)

    def wrote(self, destination: Destination) -> None:
        self._sent[destination] += 1

    def take(self, pump: Pump) -> None:
        for name, count in pump.counts.items():
            if name.startswith("["):
                self._sent[Destination(*json.loads(name))] += count
        self._reasons.update(pump.reasons)

    def result(self) -> Redrive:
        parked = (
            Parked(each, self._sent[each], count - self._sent[each])
            for each, count in self._seen.most_common()
            if each != _UNREADABLE
        )
        reasons = tuple(reason for reason, _ in self._reasons.most_common(5))
        return Redrive(tuple(parked), self._seen[_UNREADABLE], reasons)


def _stands(connection: Any, exchange: str, known: dict[str, bool]) -> bool:
    if exchange not in known:
        channel = connection.channel()
        try:
            channel.exchange_declare(exchange, "topic", passive=True)
        except NotFound:
            known[exchange] = False
        else:
            known[exchange] = True
            channel.close()
    return known[exchange]


def _to_file(  # noqa: PLR0913, PLR0917 - a step of redrive
    taking: Any,
    asking: Any,
    topology: Topology,
    sorter: _Sorter,
    file: IO[str],
    count: int,
    many: int,
    progress: Progress,
) -> None:
    """Write messages, and take each from its queue only when it is safely in the file."""
    channel = amqp.Channel(taking.connection, auto_decode=False)
    channel.open()
    acks = Acks(channel)
    written: list[int] = []

    def parked_anew(outcome: Outcome) -> None:
        if outcome.state == CONFIRMED:
            acks.add(outcome.tag)

    with PublishBatch(asking.channel(), on_outcome=parked_anew) as batch:
        for number in range(1, count + 1):
            message = channel.basic_get(topology.parking)
            if message is None:
                break
            tag = message.delivery_tag
            destination, unpacked = sorter.read(message)
            wanted = sorter.wants(destination)
            if wanted and sorter.is_early(message):
                sorter.stays(_NOT_DUE)
                wanted = False
            if wanted:
                file.write(dump(destination, unpacked) + "\n")
                sorter.wrote(destination)
                written.append(tag)
            elif deliveries(message) >= many:
                again = sorter.again(message, "kept")
                batch.publish(again.message, again.exchange, again.routing_key, tag=tag)
            if len(written) == 1000 or number == count:
                _settle(acks, file, written)
            progress(number)
    _settle(acks, file, written)
    acks.settle()
    # What was not written goes back.
    channel.close()


def _settle(acks: Acks, file: IO[str], written: list[int]) -> None:
    file.flush()
    try:
        os.fsync(file.fileno())
    except OSError as exc:
        # A pipe has nothing to sync, and a file in memory not even a number. A full disk has.
        if exc.errno not in (None, errno.EINVAL, errno.ENOTSUP):
            raise
    for tag in written:
        acks.add(tag)
    acks.send()
    written.clear()


# -- one message as one line ---------------------------------------------------------------------


def dump(destination: Destination, message: Any) -> str:
    """Write a message as a line of JSON."""
    body = message.body.encode() if isinstance(message.body, str) else bytes(message.body)
    return json.dumps(
        {
            "exchange": destination.exchange,
            "routing_key": destination.routing_key,
            "properties": _plain(message.properties),
            "body": base64.b64encode(body).decode(),
        }
    )


def load(line: str) -> tuple[Destination, Any]:
    """Read a message from a line of JSON: the inverse of :func:`dump`."""
    read = json.loads(line)
    if not (isinstance(read["exchange"], str) and isinstance(read["routing_key"], str)):
        raise TypeError("an exchange and a routing key are strings")
    message = amqp.Message(_bytes(read["body"]), **_rich(read["properties"]))
    return Destination(read["exchange"], read["routing_key"]), message


def _plain(value: Any) -> Any:
    """Write what AMQP has and JSON has not as a table with one key, ``$`` and its type."""
    if isinstance(value, dict):
        plain = {str(name): _plain(each) for name, each in value.items()}
        return {"$table": plain} if any(name.startswith("$") for name in plain) else plain
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"$bytes": base64.b64encode(bytes(value)).decode()}
    if isinstance(value, datetime):
        return {"$time": value.replace(tzinfo=value.tzinfo or timezone.utc).isoformat()}
    if isinstance(value, Decimal):
        return {"$decimal": str(value)}
    return value


def _rich(value: Any) -> Any:
    if isinstance(value, list):
        return [_rich(each) for each in value]
    if not isinstance(value, dict):
        return value
    kinds = dict(_typed(value))
    return kinds.popitem()[1] if kinds else {name: _rich(each) for name, each in value.items()}


def _typed(value: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, each in value.items():
        if name == "$table":
            yield name, {key: _rich(one) for key, one in each.items()}
        elif name == "$bytes":
            yield name, _bytes(each)
        elif name == "$time":
            # As py-amqp reads one: without a zone, in UTC.
            yield name, datetime.fromisoformat(each).replace(tzinfo=None)
        elif name == "$decimal":
            yield name, Decimal(each)


def _bytes(text: str) -> bytes:
    # What is no base64 is not to be skipped.
    return base64.b64decode(text, validate=True)
