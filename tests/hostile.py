"""What anybody may write where we read: values, headers, keys and names, as Hypothesis draws them.

Messages from a broker have what py-amqp decodes: header names and values that are not UTF-8 are
bytes, and a property can have half a pair of surrogates. A program can publish anything.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

from hypothesis import strategies as st

from kombu_binary_delay import Ladder, Topology
from kombu_binary_delay.ladder.address import length
from kombu_binary_delay.ladder.delay import LATEST
from kombu_binary_delay.ladder.foreign import CELERY, NSERVICEBUS, NSERVICEBUS_V1, celery
from kombu_binary_delay.ladder.ladder import MAX_KEY

#: Where messages of these names wait, arrive, or are parked.
OURS = Topology(Ladder.binary(12, 1000))
LADDERS = [OURS, CELERY, celery("shop"), NSERVICEBUS, NSERVICEBUS_V1]
OF_LADDERS = [
    *(
        name
        for ladder in LADDERS
        for name in (ladder.delivery, ladder.level_name(0), ladder.level_name(5))
    ),
    *(OURS.parking, OURS.mirror_name("events"), OURS.queue_relay_name("mail"), OURS.direct),
    *("other.v2.delivery", "other.v2.mirror.events", "kbd.v2-1ms-300000000000x1.level-00"),
    *("kbd.v2-8ms-2x255.level-00", "kbd.v1.delivery", "kbd.v2-classic.parking"),
]
#: The deepest nesting that is drawn: a little less than what py-amqp reads.
DEEPEST = 400


def nested(depth: int, *, table: bool) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = {"x-delay": value} if table else [value]
    return value


NUMBERS = st.sampled_from(
    [0, 1, -1, 255, 2**31, 2**32, 2**60, 2**63 - 1, -(2**63), LATEST, LATEST + 1]
)
TIMES = st.sampled_from(
    [
        "2030-01-01T00:00:00",
        "9999-12-31T23:59:59-23:59",
        "0001-01-01T00:00:00+23:59",
        "10000-01-01",
        "T24:00",
        "9" * 5000,
    ]
)
ODD_TEXT = st.sampled_from(
    ["\ud800", "\x00", "\x1b[2J", "x" * 255, "é" * 127, "x" * 256, "1e999999999", "sNaN", "%", "!"]
)
TEXT = st.text(max_size=9) | ODD_TEXT
#: As AMQP's short strings.
SHORT = TEXT.filter(lambda text: length(text) <= MAX_KEY)
FIELD_NAMES = st.text(max_size=3) | st.sampled_from([b"\xff", "$bytes", "$table", "queue", "due"])
#: RabbitMQ knows no others.
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
#: Whatever py-amqp can decode.
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | NUMBERS
    | TIMES
    | FLOATS
    | st.sampled_from(
        [
            Decimal("1e-255"),
            Decimal("-0.5"),
            *map(datetime.fromisoformat, ("1970-01-01", "9999-12-31")),
        ]
    )
    | TEXT
    | st.binary(max_size=9),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(FIELD_NAMES, children, max_size=2)
    ),
    max_leaves=6,
) | st.builds(nested, st.sampled_from([1, 40, DEEPEST]), table=st.booleans())
#: Whatever a program can have in its hands.
OBJECTS = VALUES | st.sampled_from(
    [
        *(2**64, 10**30, 10**5000, -(10**5000)),
        *map(Decimal, ("NaN", "sNaN", "1e99", "1e-999")),
        *map(float, ("nan", "inf")),
        datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=23))),
        datetime(9999, 12, 31, 23, tzinfo=timezone(timedelta(hours=-23))),
        *(object(), {1}, ("a", 1), (b"\xff",), b"x" * 300, "x" * 300, ...),
        nested(3000, table=True),
    ]
)


def table(values: st.SearchStrategy[Any], **known: st.SearchStrategy[Any]) -> Any:
    """Draw a table with some of these fields, or something else."""
    return values | st.fixed_dictionaries({}, optional={**known, "more": values})


def headers(values: st.SearchStrategy[Any] = VALUES) -> st.SearchStrategy[dict[Any, Any]]:
    """Draw the headers of a message: those that are read somewhere, and others."""
    keys = st.lists(values, max_size=3)
    texts = st.lists(TEXT | st.sampled_from(KEYS), max_size=3)
    death = table(
        values,
        queue=values | st.sampled_from(OF_LADDERS),
        exchange=values | st.sampled_from(OF_LADDERS),
        reason=values,
        **{"routing-keys": keys | texts},
    )
    deaths = st.lists(death, max_size=2) | values
    names = TEXT | values
    return st.fixed_dictionaries(
        {},
        optional={
            "x-binary-delay": table(
                values,
                due=NUMBERS | values,
                to=keys | st.lists(TEXT, min_size=2, max_size=2),
                cc=keys | texts,
                bcc=keys | texts,
                death=table(values, **{"x-death": deaths, "x-last-death-queue": values}),
                expiration=st.sampled_from(["1000", "-1", "soon", "9" * 300]) | values,
                **{"as": keys | st.lists(TEXT, min_size=2, max_size=2)},
            ),
            "x-delay": NUMBERS | values,
            "x-delay-jitter": NUMBERS | values,
            "eta": TIMES | values,
            "task": names,
            "id": st.sampled_from(["i", "j"]) | values,
            "retries": values,
            "headers": table(values, **{"x-delay-key": values, "x-delay": values}),
            "x-delay-key": st.sampled_from(["i", "k"]) | values,
            "x-delay-key-max-wait": values,
            "x-delay-replaces": st.sampled_from(["i", "j"]) | values,
            "x-delay-generation": st.sampled_from(["1-a", "f" * 99 + "-b"]) | values,
            "replaced_task_nesting": values,
            "stamps": table(values, order=values) | st.just({b"\xff": ["1"]}),
            "CC": keys | texts | values,
            "BCC": keys | texts | values,
            "x-death": deaths,
            "x-first-death-exchange": values,
            "x-first-death-queue": values,
            "x-last-death-reason": values,
            "x-delivery-count": values,
            "argsrepr": values,
            "kwargsrepr": values,
            "x-stream-offset": values,
            "NServiceBus.TimeSent": st.just("2030-01-31 12:00:00:000000 Z") | values,
            "NServiceBus.Retries.Timestamp": values,
            "NServiceBus.Transport.RabbitMQ.DelayInSeconds": NUMBERS | values,
        },
    )  # fmt: skip


def properties(values: st.SearchStrategy[Any] = VALUES) -> st.SearchStrategy[dict[str, Any]]:
    """Draw the properties of a message."""
    return st.fixed_dictionaries(
        {"application_headers": headers(values)},
        optional={
            "message_id": SHORT,
            "correlation_id": SHORT,
            "reply_to": SHORT,
            "priority": st.integers(0, 255),
            "expiration": st.just("60000"),
        },
    )


#: Addresses of ours and of other ladders, whole and broken.
KEYS = [
    *("0.0.1.@..mail", "1." * 12 + "@.events.k", "0." * 27 + "1.mail", "1." * 28, "@..", "@.!"),
    *("0.1.@.%.x", "1.@.x.!" + "0" * 40, "1.@.!" + "0" * 40 + ".x", "1.@..!" + "f" * 40, "1.@!..a"),
    *("9.@..a", "\u0661.@..a", "1." * 127, "#.@..*", "1.@..kbd.v2.amendments", "1.0.@..@..x"),
]
NAMES = (
    st.text(max_size=40)
    | st.sampled_from([*OF_LADDERS, *KEYS, "mail", "events", "x" * 255, "é" * 127, "\ud800"])
    | st.lists(st.sampled_from([*OF_LADDERS, *KEYS, "x", "2", "ms", "-"]), max_size=4).map("".join)
)
