"""What is left out of a header frame is what would be removed after it is decoded, and no more."""

from datetime import UTC, datetime
from functools import partial
from struct import pack

import pytest
from amqp import Message
from hypothesis import given
from hypothesis import strategies as st

from kombu_binary_delay import Topology
from kombu_binary_delay.ladder.envelope import HEADER, left_at, unwrap
from kombu_binary_delay.wire.header_frames import without_deaths

TOPOLOGY = Topology()
OURS = [TOPOLOGY.level_name(level) + ".0001" for level in (2, 1, 0)]
#: The start of a header frame's payload, with the size of a body that does not matter here.
START = pack(">HHQ", 60, 0, 7)

texts = st.text(max_size=20) | st.sampled_from(["x-death", "\x05queueS", "\x07x-deathA"])
values = st.recursive(
    st.none() | st.booleans() | texts | st.integers(-(2**63), 2**63 - 1) | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
deaths = st.fixed_dictionaries(
    {
        "count": st.integers(1, 2**40),
        "reason": st.sampled_from(["expired", "rejected", "maxlen"]),
        "queue": st.sampled_from([*OURS, "theirs", "queue", ""]),
        "exchange": texts,
        "routing-keys": st.lists(texts, max_size=2),
    },
    optional={"time": st.integers(10, 2**31).map(partial(datetime.fromtimestamp, tz=UTC)) | texts},
).flatmap(lambda death: st.permutations(list(death.items())).map(dict))
ends = st.dictionaries(st.sampled_from(["x-first-death-queue", "x-last-death-reason"]), texts)


@st.composite
def headers(draw):
    """Draw the headers of a message, with and without a ladder's, in any order."""
    drawn = draw(st.dictionaries(texts, values, max_size=6)) | draw(ends)
    if draw(st.booleans()):
        drawn[HEADER] = {"due": draw(st.integers(0, 2**50))}
    if draw(st.booleans()):
        drawn["x-death"] = draw(st.lists(deaths | values, max_size=8) | values)
    return dict(draw(st.permutations(list(drawn.items()))))


def payload(properties):
    return START + Message("", **properties)._serialize_properties()  # noqa: SLF001


def decoded(data):
    message = Message()
    message.inbound_header(data)
    return message.properties


def time_of(data):
    return left_at(decoded(data)["application_headers"], TOPOLOGY.owns)


def unwrapped(properties):
    if HEADER in properties.get("application_headers", {}):
        unwrap(properties, TOPOLOGY.owns)
    return properties


@given(
    headers=headers(),
    others=st.fixed_dictionaries(
        {},
        optional={
            "content_type": st.just("application/json"),
            "content_encoding": st.just("utf-8"),
            "delivery_mode": st.just(2),
            "message_id": st.text("abc", max_size=40),
            "timestamp": st.just(1_790_000_000),
        },
    ),
)
def test_a_message_comes_out_as_if_all_had_been_decoded(headers, others):
    data = payload({**others, "application_headers": headers})

    assert unwrapped(decoded(without_deaths(data, TOPOLOGY.owns))) == unwrapped(decoded(data))
    # And with the time at which it left the ladder, if somebody asks for that.
    timed = without_deaths(data, TOPOLOGY.owns, keep_time=True)
    if HEADER in headers:
        assert time_of(timed) == time_of(data)
    assert unwrapped(decoded(timed)) == unwrapped(decoded(data))


DEATH = {"count": 1, "reason": "expired", "queue": OURS[0], "exchange": "", "routing-keys": ["k"]}
THEIRS = {**DEATH, "queue": "theirs"}
MARK = {HEADER: {"due": 5}}


@pytest.mark.parametrize(
    ("headers", "left"),
    [
        ({**MARK, "x-death": [DEATH], "x-first-death-queue": OURS[0], "mine": 1}, ["mine", HEADER]),
        ({"x-last-death-reason": "expired", "x-death": [DEATH, DEATH], **MARK}, [HEADER]),
        ({**MARK, "x-death": [DEATH, THEIRS]}, ["x-death", HEADER]),
        ({"x-death": [DEATH]}, ["x-death"]),
        ({**MARK, "x-death": []}, ["x-death", HEADER]),
        ({**MARK, "mine": {"x-death": [DEATH]}}, ["mine", HEADER]),
    ],
    ids=["ours", "two of ours", "one of another queue", "no ladder", "empty", "of the user's"],
)
def test_only_the_deaths_of_a_message_that_was_on_the_ladder_are_left_out(headers, left):
    left_over = decoded(without_deaths(payload({"application_headers": headers}), TOPOLOGY.owns))

    assert sorted(left_over["application_headers"]) == sorted(left)


@pytest.mark.parametrize("kind", "tbBsuIiflLdTDVSxAF")
def test_a_value_of_each_type_that_rabbitmq_sends_is_passed_over(kind):
    sizes = {"t": 1, "b": 1, "B": 1, "s": 2, "u": 2, "I": 4, "i": 4, "f": 4, "D": 5, "V": 0}
    value = b"\0" * (4 if kind in "SxAF" else sizes.get(kind, 8))
    mine = b"\x04mine" + kind.encode() + value
    whole = payload({"application_headers": {**MARK, "x-death": [DEATH]}})
    size = int.from_bytes(whole[14:18], "big") + len(mine)
    data = whole[:14] + pack(">I", size) + mine + whole[18:]

    table = decoded(without_deaths(data, TOPOLOGY.owns))["application_headers"]

    assert sorted(table) == ["mine", HEADER]


def test_a_value_of_an_unknown_type_is_left_to_py_amqp():
    whole = payload({"application_headers": {**MARK, "x-death": [DEATH]}})
    data = whole[:18] + b"\x04mine?" + whole[18:]

    assert without_deaths(data, TOPOLOGY.owns) is data
