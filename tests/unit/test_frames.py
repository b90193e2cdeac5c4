"""What a batch writes is, byte for byte, what py-amqp writes."""

import math
from typing import Any

import amqp
import pytest
from amqp import spec
from amqp.method_framing import frame_writer
from amqp.serialization import dumps
from hypothesis import given
from hypothesis import strategies as st

from kombu_binary_delay.publishing.frames import UNWRITABLE, EncodedMessage, Messages
from tests.hostile import FLOATS

names = st.text(max_size=60)
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | FLOATS | names
values = st.recursive(
    scalars,
    lambda nested: st.lists(nested, max_size=3) | st.dictionaries(names, nested, max_size=3),
    max_leaves=5,
)
#: By the letters that py-amqp has for the types of properties.
kinds = {
    "s": names,
    "o": st.integers(0, 255),
    "F": st.dictionaries(names, values, max_size=3),
    "L": st.integers(0, 2**40),
}
properties = {name: st.none() | kinds[kind] for name, kind in amqp.Message.PROPERTIES}
publishes = st.fixed_dictionaries(
    {
        "body": (st.binary(max_size=300) | st.text(max_size=90)).map(lambda body: body * 90),
        "properties": st.fixed_dictionaries({}, optional=properties),
        "exchange": names,
        "routing_key": names,
        "flags": st.tuples(st.booleans(), st.booleans()),
    }
)


class Wire:
    """A connection, and its transport, that keep what is written."""

    def __init__(self, frame_max):
        self.frame_max, self.bytes_sent, self.transport, self.written = frame_max, 0, self, b""
        self.frame_writer = frame_writer(self, self)

    def write(self, data):
        self.written += bytes(data)


@given(st.lists(publishes, min_size=1, max_size=3), st.integers(8192, 9000))
def test_messages_are_written_as_py_amqp_writes_them(publishes, frame_max):
    theirs, ours, alone = Wire(frame_max), Wire(frame_max), Wire(frame_max)
    together = Messages(ours, 7)
    for publish in publishes:
        publish["properties"]["content_encoding"] = "utf-8"
        arguments = dumps(
            "Bssbb", (0, publish["exchange"], publish["routing_key"], *publish["flags"])
        )
        message = amqp.Message(publish["body"], **publish["properties"])
        theirs.frame_writer(1, 7, spec.Basic.Publish, arguments, message)
        encoded = EncodedMessage(publish["body"], dict(publish["properties"]), frame_max)
        alone.frame_writer(1, 7, spec.Basic.Publish, arguments, encoded)
        together.add(**publish)
    together.send()
    assert ours.written == alone.written == theirs.written


@pytest.mark.parametrize("value", [math.inf, [math.nan], {"a": (1.0, -math.inf)}], ids=repr)
def test_a_number_that_rabbitmq_cannot_read_is_refused(value):
    # It would close the connection.
    with pytest.raises(ValueError, match="which is no finite number"):
        EncodedMessage(b"", {"application_headers": {"value": value}}, 4096)


def test_what_py_amqp_writes_is_written_however_deep_it_is_nested():
    table: dict[str, Any] = {}
    for _ in range(200):
        table = {"": [table]}
    theirs = amqp.Message(b"", application_headers=table)

    ours = EncodedMessage(b"", {"application_headers": table}, 9000)

    assert ours._serialize_properties() == theirs._serialize_properties()  # noqa: SLF001 - both


def test_a_header_is_written_as_it_is_now_and_not_as_in_the_message_before():
    theirs, ours = Wire(9000), Wire(9000)
    together = Messages(ours, 7)
    changing: list[Any] = [1]
    for value in (1, True, 1.0, "1", None, "x" * 300, changing, changing, 1):
        changing[0] += 1
        message = amqp.Message(b"", application_headers={"same": "y", "changes": value})
        theirs.frame_writer(1, 7, spec.Basic.Publish, dumps("Bssbb", (0, "", "", 0, 0)), message)
        together.add(b"", message.properties, "", "", (False, False))
    together.send()
    assert ours.written == theirs.written


@pytest.mark.parametrize(
    "wrong",
    [
        {"exchange": "x" * 256},
        {"exchange": 5},
        {"body": 5},
        {"properties": {"priority": 256}},
        {"properties": {"message_id": "x" * 256}},
        {"properties": {"message_id": 5}},
        {"properties": {"application_headers": {"unwritable": ...}}},
        {"properties": {"application_headers": {None: "unwritable"}}},
        {"properties": {"application_headers": {"large": "x" * 1000}}},
    ],
    ids=lambda wrong: str(wrong)[:60],
)
def test_of_what_cannot_be_written_nothing_is(wrong):
    wire = Wire(1000)
    together = Messages(wire, 1)
    good: dict[str, Any] = {
        "body": b"",
        "properties": {},
        "exchange": "",
        "routing_key": "",
        "flags": (False,) * 2,
    }
    together.add(**good)
    size = together.size
    with pytest.raises(UNWRITABLE):
        together.add(**{**good, **wrong})
    assert together.size == size
    together.add(**good)
    together.send()
    half = len(wire.written) // 2
    assert wire.written == wire.written[:half] * 2


@pytest.mark.parametrize("properties", [{}, {"content_encoding": None}])
def test_a_text_without_an_encoding_is_written_in_utf_8(properties):
    message = EncodedMessage("é", properties, 8192)
    assert (message.body, message.properties["content_encoding"]) == ("é".encode(), "utf-8")
