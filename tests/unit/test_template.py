"""A batch that fills templates writes, byte for byte, what it writes of whole messages."""

from __future__ import annotations

import re
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import amqp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kombu_binary_delay.amendments.generations import Generations
from kombu_binary_delay.errors import BinaryDelayError
from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.ladder.parts import Queue
from kombu_binary_delay.publishing import batch as batches
from kombu_binary_delay.publishing.batch import CONFIRMED, DISCARDED, PublishBatch
from kombu_binary_delay.publishing.frames import Messages
from kombu_binary_delay.publishing.template import Run, Template
from kombu_binary_delay.publishing.way_out import WayOut
from kombu_binary_delay.routing.router import Router
from kombu_binary_delay.settings import Settings
from tests.simulated_broker import SimulatedBroker

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
TO_MAIL = Destination("", "mail")
NOW = 1_900_000_000_000_000  # microseconds since the epoch
VARYING = ("id", "eta", "expires")


class Wire:
    """A connection, its transport and its channel, that keep what is written."""

    frame_max, bytes_sent, frame_writer = 131072, 0, None
    connected, refusal = True, None

    def __init__(self, settings):
        self.transport = self.connection = self
        self.written, self.writes = b"", 0
        simulated = SimulatedBroker()
        simulated.declare_one(Queue("mail", ()))
        executor: Any = SimpleNamespace(run=simulated.run)
        server = {"product": "RabbitMQ", "version": "4.1.0"}
        router = Router(Settings.from_transport_options({"binary_delay": settings}), server)
        amendments: Any = None
        self.way_out = WayOut(self, router, executor, None, Generations(amendments))

    def write(self, data):
        self.written += data
        self.writes += 1

    @contextmanager
    def answered_within(self, seconds):
        yield


class Channel(amqp.Channel):
    """A channel of that connection, which is not open."""

    in_transaction = False

    def __init__(self, wire):
        self.connection, self.way_out, self.events = wire, wire.way_out, {}


def a_batch(settings):
    wire: Any = Wire(settings)
    batch = PublishBatch(Channel(wire), 1000)
    batch._confirm_channel, batch._messages = wire, Messages(wire, 1)  # noqa: SLF001 - as if open
    return batch, wire


def flush(batch):
    """Send what is buffered; the broker confirms all at once."""

    def confirms(*_):
        batch._on_ack(batch._number, multiple=True)  # noqa: SLF001 - as its channel calls it

    with patch.object(batches, "drain", confirms):
        batch.flush()


#: The longest text of a property has 255 bytes.
ids = st.text(st.characters(codec="utf-8"), min_size=1).filter(
    lambda text: len(text.encode()) < 256
)
rows: Any = st.lists(
    st.fixed_dictionaries(
        {
            "id": ids,
            #: In microseconds; None if it asks for none.
            "delay": st.none() | st.integers(-(10**9), 10**15),
            "ttl": st.none() | st.sampled_from(["0", "60000", "-1", "soon"]),
            "headers": st.dictionaries(
                st.sampled_from(["tenant", "CC", "x-delay-jitter", "x-death", "x-delay", "b"]),
                st.sampled_from(["x", 7, None, [1], ["mail"], {}]),
                max_size=2,
            ),
            "body": st.binary(max_size=9),
        }
    ),
    max_size=9,
)
kinds = st.fixed_dictionaries(
    {
        "priority": st.sampled_from([None, 0, 7]),
        "to": st.sampled_from([("", "mail"), ("amq.topic", "a.b"), ("", "q" * 240), ("none", "k")]),
        "before": st.sampled_from([None, "compression"]),
    }
)
ladders: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        {},
        {"radix": 2},
        {"lanes": 3},
        {"jitter": 5000},
        {"tick": 1000, "radix": 10, "levels": 4},
        {"queue_per_delay": True},
        {"foreign_ladder": "nservicebus"},
        {"declare": "never"},
    ]
)


def run_of(template, rows):
    """Return messages of a kind, each with what differs of it."""
    due = [None if row["delay"] is None else NOW + row["delay"] for row in rows]
    etas = [None if at is None else (EPOCH + timedelta(microseconds=at)).isoformat() for at in due]
    ids, further = [row["id"] for row in rows], [row["headers"] for row in rows]
    ttl = [row["ttl"] for row in rows]
    return Run(
        template,
        [row["body"] for row in rows],
        due,
        headers={"id": ids, "eta": etas, "expires": [None] * len(rows)},
        properties={"correlation_id": ids, **({"expiration": ttl} if any(ttl) else {})},
        further=further if any(further) else None,
    )


@given(rows, kinds, ladders)
def test_what_is_filled_in_is_what_a_whole_message_is(rows, kind, settings):
    headers = {"lang": "py", "id": "i", "task": "t", "eta": "e", "expires": None, "n": [None, 1]}
    if kind["before"]:
        headers["compression"] = "gzip"
    same = {"content_type": "application/json", "priority": kind["priority"], "reply_to": "r"}
    properties = {**same, "application_headers": headers}
    destination = Destination(*kind["to"])
    template = Template(properties, destination, VARYING, kind["before"])
    whole, theirs = a_batch(settings)
    filled, ours = a_batch(settings)
    refused = set()
    with patch("time.time_ns", lambda: NOW * 1000):
        run = run_of(template, rows)
        for place, body in enumerate(run.bodies):
            one = amqp.Message(body)
            one.properties = run.read(place)
            try:
                whole.publish(one, *destination)
            except (BinaryDelayError, TypeError):
                refused.add(place)
        flush(whole)
        filled.fill(run)
        flush(filled)
    assert ours.written == theirs.written
    assert {n for n, state in enumerate(run.states) if state == DISCARDED} == refused
    assert set(run.states) <= {CONFIRMED, DISCARDED}


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({}, "headers must have what differs by the template, ['eta', 'id'], got []"),
        ({"headers": {"id": "ab", "eta": "ab", "x": "ab"}}, "got ['eta', 'id', 'x']"),
        ({"headers": {"id": "ab", "eta": "a"}}, "eta must have 2 values, got 1"),
        ({"headers": {"id": "ab", "eta": "ab"}, "further": [{}]}, "further must have 2 values"),
        ({"headers": {"id": "ab", "eta": "ab"}, "due": [None] * 3}, "due must have 2 values"),
    ],
)
def test_columns_that_do_not_fit_are_refused_before_anything_is_published(columns, words):
    template = Template({"application_headers": {"id": 1, "eta": 1, "n": 1}}, TO_MAIL, VARYING)
    with pytest.raises(ValueError, match=re.escape(words)):
        Run(template, [b"a", b"b"], **{"due": [None] * 2, **columns})


def test_most_messages_of_a_kind_are_written_at_once():
    headers = {"task": "t", **dict.fromkeys(VARYING)}
    template = Template({"application_headers": headers}, TO_MAIL, VARYING)
    batch, wire = a_batch({})
    same: dict[str, Any] = {"body": b"", "ttl": None, "headers": {}}
    messages = [{"id": str(n), "delay": 10**9 + n, **same} for n in range(50)]
    with patch("time.time_ns", lambda: NOW * 1000):
        batch.fill(run_of(template, messages))
        # The first asks for what it needs; then all that is left goes out.
        assert wire.writes == 2
        flush(batch)


# Jitter is for those that ask for their delay by a header.
@given(
    st.lists(st.integers(1, 10**12), max_size=5),
    ladders.filter(lambda ladder: "jitter" not in ladder),
)
def test_what_is_filled_in_needs_no_header_that_asks_for_its_delay(delays, settings):
    template = Template({"application_headers": {}, "priority": 3}, TO_MAIL, ())
    whole, theirs = a_batch(settings)
    filled, ours = a_batch(settings)
    with patch("time.time_ns", lambda: NOW * 1000):
        for delay in delays:
            one = amqp.Message(b"hi", priority=3, application_headers={"x-delay": delay})
            with suppress(BinaryDelayError):
                whole.publish(one, routing_key="mail")
        flush(whole)
        due = [NOW + delay * 1000 for delay in delays]
        filled.fill(Run(template, [b"hi"] * len(due), due))
        flush(filled)
    assert ours.written == theirs.written
