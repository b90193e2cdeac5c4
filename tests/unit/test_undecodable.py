"""Whatever is in a header frame is decoded, or left as it is."""

from struct import pack

import amqp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kombu_binary_delay.ladder.envelope import OFFSET
from kombu_binary_delay.wire.undecodable import decode
from tests.raw_messages import RAW, table

#: The start of a header frame's payload, with the size of a body that does not matter here.
START = pack(">HHQ", 60, 0, 7)
FIELD = bytes([len(OFFSET)]) + OFFSET.encode() + b"l" + pack(">q", 5)


@pytest.mark.parametrize("raw", RAW.values(), ids=RAW)
def test_the_offset_of_a_record_is_read_though_nothing_else_can_be(raw):
    whole = table((raw[6:] if raw[0] == 0x20 else b"\1tT" + b"\xff" * 8) + FIELD)

    assert decode(START + whole).headers[OFFSET] == 5


@given(st.binary(max_size=60) | st.binary(max_size=60).map(lambda end: table(FIELD + end)))
def test_nothing_in_a_header_frame_raises(raw):
    assert isinstance(decode(START + raw).properties, dict)


def test_headers_that_can_be_decoded_are():
    raw = amqp.Message("", application_headers={"a": [1]})._serialize_properties()  # noqa: SLF001

    assert decode(START + raw).headers == {"a": [1]}
