"""What a message's headers say about when it is due."""

from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kombu_binary_delay import DelayError
from kombu_binary_delay.ladder.delay import due_time, keep_due, plain_exchange, spread

NOW = 1_800_000_000_000_000
SECOND = 1_000_000


def at(seconds):
    return datetime.fromtimestamp(NOW // SECOND, UTC) + timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("headers", "delay"),
    [
        ({}, None),
        ({"x-delay": 0}, None),
        ({"x-delay": 1500}, 1_500_000),
        ({"x-delay": 1500.0}, 1_500_000),
        ({"x-delay": 0.0001}, 1),
        ({"x-delay": "1500"}, 1_500_000),
        ({"x-delay": Decimal("1.5")}, 1500),
        ({"x-delay": 2**32}, 2**32 * 1000),
        # A Celery message of protocol 2 has a task header; another program's eta is its own.
        ({"eta": "soon"}, None),
        ({"task": "t", "eta": None}, None),
        ({"task": "t", "eta": at(2).isoformat()}, 2 * SECOND),
        ({"task": "t", "eta": at(2)}, 2 * SECOND),
        ({"task": "t", "eta": at(-2).isoformat()}, -2 * SECOND),
        ({"task": "t", "eta": at(0.000001).isoformat()}, 1),
        ({"task": "t", "eta": at(2).replace(tzinfo=None).isoformat()}, 2 * SECOND),
        ({"task": "t", "eta": at(2).replace(tzinfo=None).isoformat() + "Z"}, 2 * SECOND),
        (
            {"task": "t", "eta": at(2).astimezone(timezone(timedelta(hours=5.5))).isoformat()},
            2 * SECOND,
        ),
        # Where both ask, neither is broken.
        ({"task": "t", "eta": at(2).isoformat(), "x-delay": 3000}, 3 * SECOND),
        ({"task": "t", "eta": at(4).isoformat(), "x-delay": 3000}, 4 * SECOND),
    ],
)
def test_a_header_tells_when_a_message_is_due(headers, delay):
    assert due_time(headers, NOW) == (None if delay is None else NOW + delay)


@pytest.mark.parametrize(
    "value",
    [
        -1,
        -0.001,
        float("nan"),
        float("inf"),
        "",
        "soon",
        "nan",
        None,
        True,
        [],
        b"5",
        10**400,
        "1e999",
    ],
)
def test_an_x_delay_that_is_no_delay_is_refused_with_its_value(value):
    with pytest.raises(DelayError, match="x-delay") as refusal:
        due_time({"x-delay": value}, NOW)
    # At most a hundred characters of it.
    assert repr(value)[:100] in str(refusal.value)


MILLISECONDS = st.integers(0, 10**9) | st.floats(0, 1e9)


@given(delay=MILLISECONDS.filter(bool), jitter=MILLISECONDS, name=st.text(), task=st.booleans())
def test_jitter_is_after_the_due_time_and_never_before_it(delay, jitter, name, task):
    asked = {"x-delay": delay, **({"task": "t", "id": name} if task else {})}
    exact = due_time(asked, NOW) or 0
    asked["x-delay-jitter"] = jitter
    due = due_time(asked, NOW, "" if task else name) or 0
    assert exact <= due <= exact + jitter * 1000 + 1
    # Whoever publishes it again.
    assert due == due_time(asked, NOW, "" if task else name)


def test_jitter_is_spread_evenly_over_ids():
    parts, count = 20, 20_000
    counts = [0] * parts
    for number in range(count):
        # Ids that differ little, as those that somebody numbers.
        counts[spread(f"order-{number}", parts * SECOND) // SECOND] += 1
    assert sum(counts) == count
    assert all(0.85 < number * parts / count < 1.15 for number in counts), counts


@pytest.mark.parametrize(
    "asked", [{}, {"x-delay": 0}, {"task": "t", "eta": None}, {"eta": at(2).isoformat()}]
)
def test_an_undelayed_message_has_no_jitter(asked):
    assert due_time({**asked, "x-delay-jitter": 60_000}, NOW, "name") is None


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "some", None, True])
def test_jitter_that_is_no_time_is_refused_with_its_value(value):
    with pytest.raises(DelayError, match=r"x-delay-jitter must be a number .* leave") as refusal:
        due_time({"x-delay": 5, "x-delay-jitter": value}, NOW, "name")
    assert repr(value) in str(refusal.value)


def test_a_message_that_is_moved_keeps_its_due_time():
    headers = {"task": "t", "id": "i", "eta": at(2).isoformat(), "x-delay-jitter": 60_000}
    due = due_time(headers, NOW) or 0
    keep_due(headers, -(-due // 1000))
    assert due <= (due_time(headers, NOW) or 0) < due + 1000


NOON = int(datetime(2030, 1, 31, 12, tzinfo=UTC).timestamp()) * SECOND


@pytest.mark.parametrize(
    ("eta", "due"),
    [
        ("2030-01-31T12:00:00", NOON),
        ("2030-01-31T12:00:00Z", NOON),
        ("2030-01-31t12:00:00Z", NOON),
        ("2030-01-31 12:00:00+00:00", NOON),
        ("2030-01-31T12:00", NOON),
        ("2030-01-31T12Z", NOON),
        ("2030-01-31", NOON - 12 * 3600 * SECOND),
        ("20300131T120000Z", NOON),
        ("20300131T1200+00", NOON),
        ("2030-01-31T12:00:00+0000", NOON),
        ("2030-01-31T12:00:00-00", NOON),
        ("2030-01-31T12:00:00.5+00:00", NOON + 500_000),
        ("2030-01-31T12:00:00,25Z", NOON + 250_000),
        ("2030-01-31T12:00:00.000001Z", NOON + 1),
        ("2030-01-31T12:00:00.1234567+00:00", NOON + 123_456),
        ("2030-01-31T17:30:00+0530", NOON),
        ("2030-01-31T17:41:16+05:41:16", NOON),
        ("2030-01-31T06:30:00.5-05:30", NOON + 500_000),
    ],
)
def test_an_eta_is_read_alike_by_every_python(eta, due):
    assert due_time({"task": "t", "eta": eta}, NOW) == due


@pytest.mark.parametrize(
    "eta",
    [
        *("", "soon", "2030-13-01T00:00:00", 5, [], True),
        # Python 3.14 reads these.
        *("2030-01-31T24:00:00", "2030-01-31 24:00Z", "20300131T24", "2030-01-31_24:00"),
        *("2030-W05-4T24:00", "2030-W05T24", "2030W05T24:00", "20300131124"),
        *(
            "2030-01-31T12:00:00z",
            "2030-0131T12:00:00",
            "2030-01-31T12:0000",
            "2030-01-31T12:00:00.",
        ),
        *("2030-01-31T12:00:00+24:00", "٢٠٣٠-01-31T12:00:00"),
    ],
)
def test_an_eta_that_does_not_parse_is_refused_with_its_value(eta):
    with pytest.raises(DelayError, match="ISO 8601") as refusal:
        due_time({"task": "t", "eta": eta}, NOW)
    assert repr(eta) in str(refusal.value)


def test_an_exchange_of_the_plugins_type_becomes_the_one_it_routes_like():
    assert plain_exchange({"x-delayed-type": "topic", "other": 1}) == ("topic", {"other": 1})


@pytest.mark.parametrize(
    "arguments", [None, {}, {"x-delayed-type": "x-delayed-message"}, {"x-delayed-type": 5}]
)
def test_a_missing_or_self_referring_type_is_refused(arguments):
    with pytest.raises(DelayError, match="x-delayed-type"):
        plain_exchange(arguments)
