"""A message that cannot be decoded is taken apart, changed and put together as bytes."""

from typing import Any

import amqp
import pytest
from amqp.serialization import loads
from hypothesis import given
from hypothesis import strategies as st

from kombu_binary_delay.ladder.envelope import HEADERS
from kombu_binary_delay.operate.raw import joined, raw_copy, split
from tests.raw_messages import RAW, table

TEXT = st.text(max_size=20)
OF_KIND = {
    "s": TEXT,
    "o": st.integers(0, 9),
    "L": st.integers(0, 2**31),
    "F": st.dictionaries(TEXT, TEXT | st.lists(st.integers(0, 9)) | st.booleans(), max_size=3),
}
PROPERTIES = st.fixed_dictionaries(
    {}, optional={name: OF_KIND[kind] for name, kind in amqp.Message.PROPERTIES}
)


def encode(properties):
    return amqp.Message("", **properties)._serialize_properties()  # noqa: SLF001 - as it is sent


@given(PROPERTIES)
def test_properties_are_cut_where_each_ends_and_joined_again(properties):
    parts = split(encode(properties))

    assert set(parts) == set(properties)
    assert joined(parts) == encode(properties)
    assert all(encode({name: properties[name]})[2:] == part for name, part in parts.items())


@pytest.mark.parametrize("raw", RAW.values(), ids=RAW)
def test_a_copy_has_the_bytes_that_came(raw):
    copied = raw_copy(b"body", raw, without=("CC", "expiration"))

    assert (copied.body, copied.properties.raw) == (b"body", raw)
    assert copied.properties.copy().raw == raw


def test_what_is_left_out_is_in_the_note_if_that_fits():
    field = b"\2CCS\0\0\0\1a"
    raw = joined({**split(table(field + b"\1bt\1" + field)), "expiration": b"\00210"})
    raw = joined({**split(raw), "user_id": b"\4user"})
    change: Any = {"without": ("CC", "expiration"), "note": ("why", {"x": 1})}

    noted = raw_copy(b"", raw, largest=4096, **change)
    small = raw_copy(b"", raw, largest=40, **change)

    (headers,), _ = loads("F", split(noted.properties.raw)[HEADERS], 0)
    assert headers == {"b": True, "why": {"x": 1, "expiration": "10", "CC": "a"}}
    assert split(small.properties.raw) == {**split(table(b"\1bt\1")), "user_id": b"\4user"}
    assert small.properties == {"user_id": "user"}
