"""What travels with a delayed message is taken off again, to the last byte."""

from copy import deepcopy

import pytest

from kombu_binary_delay import Topology
from kombu_binary_delay.ladder.address import Destination, format_address, parse_address
from kombu_binary_delay.ladder.envelope import (
    HEADER,
    carried,
    name_deaths,
    published_as,
    seen_as,
    unwrap,
    wrap,
)

TOPOLOGY = Topology()
DIGITS = ("01", "00", "00", "00")
QUEUE = Destination("", "q")
OURS = TOPOLOGY.level_name(3) + ".01"


def packed(headers, destination=QUEUE, **properties):
    given = {**properties, "application_headers": headers}
    before = deepcopy(given)
    result = wrap(given, destination, 5, lambda to: format_address(DIGITS, to), TOPOLOGY.owns)
    assert given == before, "the caller's own properties must stay as they are"
    return result


def unpacked(properties, deaths=(), **options):
    """Let the ladder do to a message what a broker does, and take it off again."""
    properties = deepcopy(properties)
    headers = properties["application_headers"]
    if deaths:
        headers["x-death"] = list(deaths) + headers.get("x-death", [])
        headers.setdefault("x-first-death-queue", deaths[-1]["queue"])
        headers["x-last-death-queue"] = deaths[0]["queue"]
    unwrap(properties, TOPOLOGY.owns, **options)
    return properties


@pytest.mark.parametrize(
    ("headers", "properties"),
    [
        ({"mine": 1}, {}),
        ({"mine": {"deep": [1, "2"]}}, {"expiration": "7000", "priority": 3}),
        ({"CC": ["other", "third"]}, {}),
        ({"x-death": [{"queue": "theirs", "count": 2}], "x-first-death-queue": "theirs"}, {}),
        (
            {
                "x-death": [{"queue": "b"}, {"queue": "a"}],
                "x-first-death-queue": "a",
                "x-last-death-queue": "b",
            },
            {},
        ),
        ({"x-death": "not a list"}, {}),
    ],
)
def test_a_message_comes_out_as_it_went_in(headers, properties):
    wrapped, _ = packed({**headers, "x-delay": 1000}, **properties)

    arrived = unpacked(wrapped, [{"queue": OURS}, {"queue": OURS}])

    assert arrived == {**properties, "application_headers": headers}


def test_on_the_ladder_nothing_cuts_the_delay_short_or_looks_like_a_dead_letter_cycle():
    wrapped, _ = packed({"x-death": [{"queue": "theirs"}]}, expiration="5")

    assert "expiration" not in wrapped
    assert "x-death" not in wrapped["application_headers"]
    assert wrapped["application_headers"][HEADER]["due"] == 5


def test_what_is_delayed_has_not_come_back_yet():
    # A retry of a task that has, and a task that is postponed, have its count.
    wrapped, _ = packed({"mine": 1, "x-delivery-count": 3})

    assert unpacked(wrapped) == {"application_headers": {"mine": 1}}


def test_a_death_after_the_ladder_stays_and_stands_before_older_ones():
    wrapped, _ = packed({"x-death": [{"queue": "old"}], "x-first-death-queue": "old"})

    arrived = unpacked(wrapped, [{"queue": "new"}, {"queue": OURS}])["application_headers"]

    assert arrived["x-death"] == [{"queue": "new"}, {"queue": "old"}]
    assert arrived["x-first-death-queue"] == "old"
    assert arrived["x-last-death-queue"] == "new"


def test_wrapping_again_what_a_stranger_left_wrapped_does_not_grow():
    once, _ = packed({"mine": 1})
    once["application_headers"]["x-death"] = [{"queue": OURS}]

    twice, _ = packed(once["application_headers"])

    assert twice == packed({"mine": 1})[0]


@pytest.mark.parametrize("given", [{"CC": ["a"], "BCC": ["b"]}, {"BCC": ["b"]}, {"CC": ["a"]}])
def test_each_key_of_cc_and_bcc_becomes_an_address_and_no_consumer_sees_those_of_bcc(given):
    wrapped, key = packed(given, Destination("x", "k"))

    headers = wrapped["application_headers"]
    assert "BCC" not in headers, "RabbitMQ would take it off, and may forget its keys"
    keys = [key for name in ("CC", "BCC") for key in given.get(name, ())]
    assert [parse_address(header)[1] for header in headers["CC"]] == [
        Destination("x", key) for key in keys
    ]
    seen = {name: given[name] for name in given if name != "BCC"}
    # When its own queue dead-letters it, RabbitMQ lists all keys by which it came.
    came = {"queue": "q", "exchange": "x", "routing-keys": [key, *headers["CC"]]}
    arrived = unpacked(wrapped, [came, {"queue": OURS}])["application_headers"]
    name_deaths(arrived, headers, lambda _, address: parse_address(address)[1])
    (death,) = arrived.pop("x-death")
    assert death["routing-keys"] == ["k", *seen.get("CC", ())]
    assert {name: arrived[name] for name in arrived if not name.startswith("x-")} == seen
    again = unpacked(wrapped, is_read=False)["application_headers"]
    assert again == given, "who publishes it again needs them"


def test_copies_that_rabbitmq_would_refuse_stay_what_they_are():
    given = {"CC": "a", "BCC": ["b"]}

    wrapped, _ = packed(given)

    assert {name: wrapped["application_headers"][name] for name in given} == given


def test_what_goes_to_one_queue_only_is_shown_with_its_copies_and_published_again_without():
    wrapped, _ = packed({"mine": 1})
    published = Destination("events", "user.created"), {"CC": ["user.changed"]}

    seen_as(wrapped["application_headers"], *published)

    assert published_as(wrapped["application_headers"]) == published
    assert unpacked(wrapped) == {"application_headers": {"mine": 1}}


def test_a_destination_too_long_for_its_address_travels_beside_it():
    destination = Destination("", "q" * 255)

    wrapped, key = packed({}, destination)

    assert parse_address(key, carried(wrapped["application_headers"]))[1] == destination


@pytest.mark.parametrize(
    "forged",
    [
        None,
        5,
        "x",
        [],
        {},
        {"expiration": 5, "cc": 5, "bcc": 5, "to": 5, "death": 5},
        {"to": [1, 2], "cc": [1]},
        {"as": [1, 2]},
    ],
)
def test_a_forged_header_is_taken_off_and_changes_nothing(forged):
    properties = {"application_headers": {"mine": 1, HEADER: forged}}

    assert carried(properties["application_headers"]) is None
    assert published_as(properties["application_headers"]) is None
    assert unpacked(properties) == {"application_headers": {"mine": 1}}


@pytest.mark.parametrize("name", ["CC", "BCC"])
def test_further_keys_may_be_bytes_or_in_a_tuple(name):
    text, _ = packed({name: ["other", "third"]})
    assert packed({name: (b"other", "third")})[0] == text
