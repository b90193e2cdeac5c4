"""Send parked messages on: to their destination, to another one, or to a file and back."""

from __future__ import annotations

import base64
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

import amqp
from amqp.exceptions import AccessRefused

from kombu_binary_delay.amendments.parts import way_of_records
from kombu_binary_delay.batching.batch import CONFIRMED, Outcome, PublishBatch
from kombu_binary_delay.errors import DelayError, TopologyError, UnconfirmedError
from kombu_binary_delay.model.address import Destination
from kombu_binary_delay.model.envelope import HEADERS, carried, due_in, unwrap
from kombu_binary_delay.model.recognise import parking_of
from kombu_binary_delay.model.returns import RETURNS
from kombu_binary_delay.model.topology import Topology
from kombu_binary_delay.received import copy_of

from .errors import IncompleteError, OperationError, UnreachableError
from .management import Management
from .migrate import Plan
from .mover import (
    PATIENCE,
    Decision,
    Keep,
    Mover,
    Send,
    Write,
    as_new,
    key_of,
    max_deliveries,
    refused_user,
    why_undecodable,
)
from .probe import Probe
from .progress import Progress, ignore
from .reading import UNREADABLE, read_address
from .snapshot import queues_now, unknown, why_left

_NO_ADDRESS = "without an address: nothing says where it was to go; send it with --to, or --to-file"
_NOT_DUE = "not due yet: parked when a part of the ladder was missing; redrive it when it is due"
_RECORD = (
    "a record of amendments, parked when a part of its way was missing: nothing shows any more who "
    "wrote it; if it was a cancellation, cancel again, and take it out with --to-file"
)
#: How each line of a file begins, and how much of a file is read at once to find its last line.
_BEGINS, _BLOCK = b'{"exchange": "', 65_536


@dataclass(frozen=True)
class Parked:
    """The messages for one destination: how many were sent on, and how many are still parked."""

    destination: Destination
    sent: int
    stays: int


@dataclass(frozen=True)
class Redrive:
    """The messages by destination, the most first; an empty destination is for no address.

    ``reasons`` says why messages stay, also if it is not known how many.
    """

    parked: tuple[Parked, ...]
    reasons: tuple[str, ...]

    @property
    def sent(self) -> int:
        """The number of messages that were sent on."""
        return sum(each.sent for each in self.parked)

    @property
    def stays(self) -> int:
        """The number of messages that are still parked."""
        return sum(each.stays for each in self.parked)

    @property
    def unreadable(self) -> int:
        """The number of parked messages without an address."""
        return sum(each.stays for each in self.parked if each.destination == UNREADABLE)


def redrive(  # noqa: PLR0913 - which, and where to
    connect: Callable[[], Any],
    topology: Topology,
    management: Management | None = None,
    *,
    only: Destination | Collection[Destination] | None = None,
    to: Destination | None = None,
    file: IO[str] | None = None,
    progress: Progress = ignore,
) -> Redrive:
    """Send parked messages on; each leaves the parking queue after the broker's confirm.

    Messages stay parked if their queue does not exist or they are not due yet. Messages without an
    address also stay, unless ``to`` or ``file`` is given, and those that cannot be decoded, unless
    ``to`` is.

    :param connect: connects to the broker with Kombu's own transport.
    :param management: to read the parking queue's delivery limit, and whether it has a leader.
        Without an answer, a message that stays parked is published again every second time that it
        is read, and a queue without a leader counts as empty.
    :param only: take only messages for this destination, or these; an empty one is for no address.
    :param to: send them here instead of to their own destination.
    :param file: write them here, as one line of JSON each, instead of to the broker.
    :raises OperationError: if there is no parking queue, or ``to`` is a part of a ladder.
    """
    if isinstance(only, Destination):
        only = {only}
    with (
        # A connection that publishes may be blocked, and would not answer.
        connect() as taking,
        connect() as aside,
        connect() as sending,
        Probe(taking) as probe,
    ):
        count = _parked(probe, topology, to)
        sorter = _Sorter(topology, probe, only, to, to_file=file is not None)
        mover = Mover(taking, aside, sending, file)
        if count:
            mover.run(
                topology.parking,
                sorter.decide,
                requeue=sorter.requeue,
                max_deliveries=_max_deliveries(topology.parking, management),
                limit=count,
                progress=progress,
            )
        mover.close()
    done = sorter.result(mover.counts, mover.reasons)
    # At the end, since its leader may have gone away meanwhile.
    if count is None or _is_unknown(topology.parking, management):
        return replace(done, reasons=(why_left([topology.parking]), *done.reasons))
    return done


def parked(
    connection: Any,
    topology: Topology,
    management: Management | None = None,
    *,
    to: Destination | None = None,
) -> Plan:
    """Count what :func:`redrive` would read; where it is to go is not known.

    Nothing is taken: a quorum queue counts that, and an interrupt could double a message.

    :raises OperationError: as :func:`redrive`.
    """
    with Probe(connection) as probe:
        count = _parked(probe, topology, to)
    is_known = count is not None and not _is_unknown(topology.parking, management)
    reasons = () if is_known else (why_left([topology.parking]),)
    return Plan(((topology.parking, count or 0),), reasons)


def _parked(probe: Probe, topology: Topology, to: Destination | None) -> int | None:
    """Count what is parked; None if that is not known.

    :raises OperationError: if there is no parking queue, or ``to`` is a part of a ladder.
    """
    count = probe.ready(topology.parking)
    if count is None and not probe.has_queue(topology.parking):
        raise OperationError(
            f"there is no parking queue {topology.parking!r} in this virtual host; check "
            f"the virtual host and the namespace"
        )
    if to is not None:
        _refuse_a_ladder(to, probe)
    return count


def _is_unknown(parking: str, management: Management | None) -> bool:
    try:
        return management is not None and bool(unknown([parking], queues_now(management)))
    except UnreachableError:
        return False


def _max_deliveries(parking: str, management: Management | None) -> int:
    """Return how often a parked message may come back before it must be parked again."""
    if management is None:
        return 1
    try:
        row = management.get("queues", management.vhost, parking)
    except UnreachableError:
        # Assume the lowest possible limit.
        return 1
    return max_deliveries(parking, row)


def _refuse_a_ladder(to: Destination, probe: Probe) -> None:
    """Raise an error for a part of a ladder: unroutable messages would be parked silently."""
    name = to.exchange or to.routing_key
    parking = parking_of(name)
    if parking is not None and probe.has_queue(parking):
        raise OperationError(
            f"{name!r} is a part of a ladder; name a queue, or an exchange, of your own"
        )


@dataclass(frozen=True)
class Refill:
    """The numbers of messages sent from a file, and left because of ``reasons``."""

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
    """Publish the messages that :func:`redrive` wrote to a file; check all lines first.

    :param file: is read twice.
    :param to: send them here instead of to their own destination.
    :param left: called with each line that was not confirmed, also after an interrupt: sending only
        these again cannot duplicate a confirmed message.
    :raises OperationError: if a line cannot be read; then nothing was sent.
    :raises UnreachableError: if the broker went away.
    :raises IncompleteError: if ``left`` did not get all of these lines, as that was interrupted.
    """
    if not file.seekable():
        raise OperationError("the input is read twice, so it must be a file: write it to one first")
    start = file.tell()
    _look_at(file)
    if to is not None:
        with Probe(connection) as probe:
            _refuse_a_ladder(to, probe)
    file.seek(start)
    refilling = _Refilling(left)
    try:
        refilling.send(connection, _lines(file), to)
    except BaseException as exc:
        try:
            # Anew: an interrupt may have ended the reading.
            file.seek(start)
            refilling.stop(_lines(file))
        except BaseException as again:
            raise IncompleteError(
                f"{again!r} came while what was not sent was written: send the whole file again; "
                f"the {refilling.sent} messages that were sent then come twice"
            ) from again
        if isinstance(exc, UnconfirmedError):
            raise UnreachableError(
                f"the broker went away or refused, after {refilling.sent} messages were "
                f"sent: {exc.__cause__ or exc}"
            ) from exc
        raise
    return Refill(refilling.sent, sum(refilling.reasons.values()), _most(refilling.reasons))


class _Refilling:
    """Tracks which lines were sent, and reports those that were not."""

    def __init__(self, left: Callable[[str], object]) -> None:
        self._left = left
        self._pending: dict[int, str] = {}
        self._taken = 0
        self.sent = 0
        self.reasons: Counter[str] = Counter()

    def send(
        self, connection: Any, lines: Iterator[tuple[int, str]], to: Destination | None
    ) -> None:
        channel = connection.channel()
        with (
            # A connection that publishes may be blocked, and would not answer.
            connection.clone() as asking,
            Probe(asking) as probe,
            PublishBatch(channel, on_outcome=self._on_outcome) as batch,
        ):
            obstacle = cache(partial(_obstacle, probe))
            refused = cache(partial(refused_user, channel.connection))
            try:
                for number, line in lines:
                    self._pending[number] = line
                    self._taken = number
                    self._send_one(batch, number, obstacle, refused, to)
                batch.flush()
            except BaseException:
                # Before the batch closes: a broker that confirms nothing does not answer that
                # either, and an interrupt may have left a frame that is read in part.
                asking.collect()
                connection.collect()
                raise

    def _send_one(
        self,
        batch: PublishBatch,
        number: int,
        obstacle: Callable[[Destination], str],
        refused: Callable[[str], str],
        to: Destination | None,
    ) -> None:
        destination, message = load(self._pending[number])
        place = to or destination
        user = message.properties.get("user_id")
        why = obstacle(place) or (user and refused(user))
        if why:
            self._failed(number, why)
            return
        batch.publish(
            message,
            place.exchange,
            place.routing_key,
            mandatory=True,
            confirm_timeout=PATIENCE,
            tag=number,
        )

    def stop(self, lines: Iterator[tuple[int, str]]) -> None:
        for number, line in lines:
            if number in self._pending or number > self._taken:
                self._left(line)

    def _on_outcome(self, outcome: Outcome) -> None:
        if outcome.state == CONFIRMED:
            del self._pending[outcome.tag]
            self.sent += 1
        else:
            self._failed(outcome.tag, f"{outcome.state}: {outcome.reply_text}")

    def _failed(self, number: int, why: str) -> None:
        # In this order, so that an interrupt loses no line.
        self._left(self._pending[number])
        del self._pending[number]
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


def _most(reasons: Counter[str]) -> tuple[str, ...]:
    """Return the reasons why most messages stay, each with their number."""
    return tuple(
        f"{count:,} {'stays' if count == 1 else 'stay'}: {reason}"
        for reason, count in reasons.most_common(5)
    )


def _obstacle(probe: Probe, place: Destination) -> str:
    """Return why nothing can be published to a destination; empty if it can."""
    if place == UNREADABLE:
        return _NO_ADDRESS
    try:
        return _missing(probe, place)
    except TopologyError as exc:
        return f"{exc}; send them elsewhere with --to, or take them with --to-file"
    except AccessRefused as exc:
        # RabbitMQ 4.3 asks for any permission on the name. Without a queue, it returns the message;
        # without write on an exchange, it would close the channel.
        return place.exchange and (
            f"this user may not ask whether the exchange {place.exchange!r} exists: "
            f"{exc.reply_text}; grant it the permission write on that name, or send them elsewhere "
            f"with --to"
        )


def _missing(probe: Probe, place: Destination) -> str:
    """Return what keeps a message for a destination from it; empty if nothing does.

    :raises TopologyError: if the broker cannot answer.
    :raises AccessRefused: if this user may not ask.
    """
    parking = parking_of(place.exchange)
    if parking is not None and probe.has_queue(parking):
        # It parks messages that it cannot route, and the broker confirms that as well.
        return (
            f"its destination {place.exchange!r} is a part of another ladder, which does not know "
            f"{place.routing_key!r}: say where it is to go with --to, or take it with --to-file"
        )
    if place.exchange:
        kind, name, exists_there = "exchange", place.exchange, probe.has_exchange
    else:
        kind, name, exists_there = "queue", place.routing_key, probe.has_queue
        if not probe.can_ask(name):
            # Without the queue, the broker returns the message.
            return ""
    if exists_there(name):
        return ""
    return f"the {kind} {name!r} does not exist; declare it, or send them elsewhere with --to"


class _Sorter:
    """Reads parked messages, decides where each goes, and counts."""

    def __init__(
        self,
        topology: Topology,
        probe: Probe,
        only: Collection[Destination] | None,
        to: Destination | None,
        *,
        to_file: bool,
    ) -> None:
        self._topology = topology
        self._obstacle = cache(partial(_obstacle, probe))
        self._only, self._to, self._to_file = only, to, to_file
        self._seen: Counter[Destination] = Counter()

    def decide(self, message: Any) -> Decision:
        destination, unpacked = self._read(message)
        self._seen[destination] += 1
        if self._only is not None and destination not in self._only:
            return Keep("kept")
        if self._is_early(message):
            return Keep("left", _NOT_DUE)
        why = why_undecodable(message, self._topology.parking)
        if why and self._to is None:
            return Keep("left", f"{why}; send it on as it is with --only '' --to QUEUE")
        name = json.dumps([destination.exchange, destination.routing_key])
        if self._to_file:
            return Write(dump(destination, unpacked), name)
        place = self._to or destination
        is_record = place == way_of_records(self._topology)
        why = _RECORD if is_record else self._obstacle(place)
        if why:
            return Keep("left", why)
        return Send(unpacked, place.exchange, place.routing_key, name, mandatory=True)

    def requeue(self, message: Any, count: str) -> Send:
        """Return how to park a message again, with its routing key."""
        parking = self._topology.parking
        return Send(as_new(message), parking, key_of(message), count, mandatory=True)

    def _read(self, message: Any) -> tuple[Destination, Any]:
        """Return the destination of a message, and the message as it was published."""
        if why_undecodable(message, ""):
            return UNREADABLE, as_new(message)
        properties = dict(message.properties)
        headers = properties[HEADERS] = dict(properties.get(HEADERS) or {})
        key = message.delivery_info["routing_key"]
        destination = read_address(self._topology, key, carried(headers))
        if destination == UNREADABLE:
            return destination, as_new(message)
        unwrap(properties, self._topology.owns, is_read=False)
        headers.pop(RETURNS, None)
        return destination, copy_of(message, properties)

    def _is_early(self, message: Any) -> bool:
        """Return whether a message is not due yet."""
        try:
            due = due_in(message.properties.get(HEADERS) or {})
        except DelayError:
            # Another program has written it.
            return False
        return due is not None and due > time.time_ns() // 1_000_000

    def result(self, counts: Mapping[str, int], reasons: Counter[str]) -> Redrive:
        sent = Counter(
            {Destination(*json.loads(name)): counts[name] for name in counts if name[:1] == "["}
        )
        parked = (
            Parked(each, sent[each], count - sent[each]) for each, count in self._seen.most_common()
        )
        return Redrive(tuple(parked), _most(reasons))


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


def end_last_line(path: Path) -> None:
    """End the last line of a file of :func:`redrive`, or cut it off if a killed run wrote a part.

    The message of such a part was not acknowledged, so it is still parked.

    :raises OperationError: if the line is of another program.
    """
    if not path.is_file():
        # It is a pipe, or made only now.
        return
    with path.open("r+b") as file:
        start = _start_of_last_line(file)
        file.seek(start)
        line = file.read()
        if not line:
            return
        if not (_BEGINS.startswith(line) or line.startswith(_BEGINS)):
            raise OperationError(
                f"the last line of {path} is not what redrive writes, and has no end; name another "
                f"file"
            )
        try:
            load(line.decode())
        except (ValueError, KeyError, TypeError, ArithmeticError):
            file.truncate(start)
        else:
            file.write(b"\n")


def _start_of_last_line(file: IO[bytes]) -> int:
    """Return where the text after the last line's end begins, reading backwards."""
    at = file.seek(0, os.SEEK_END)
    while at:
        size = min(_BLOCK, at)
        at -= size
        file.seek(at)
        end = file.read(size).rfind(b"\n")
        if end >= 0:
            return at + end + 1
    return 0


def _plain(value: Any) -> Any:
    """Encode an AMQP type that JSON does not have as an object with one key, ``$`` and the type."""
    if isinstance(value, dict):
        plain = {str(name): _plain(each) for name, each in value.items()}
        return {"$table": plain} if any(name.startswith("$") for name in plain) else plain
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"$bytes": base64.b64encode(bytes(value)).decode()}
    if isinstance(value, datetime):
        return {"$time": value.replace(tzinfo=value.tzinfo or UTC).isoformat()}
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
            # As py-amqp reads it: in UTC, without a time zone.
            yield name, datetime.fromisoformat(each).replace(tzinfo=None)
        elif name == "$decimal":
            yield name, Decimal(each)


def _bytes(text: str) -> bytes:
    # Raise for invalid characters instead of skipping them.
    return base64.b64decode(text, validate=True)
