"""Nothing that a message's headers can hold ends an operator's command."""

from contextlib import suppress
from datetime import datetime
from decimal import Decimal

import amqp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kombu_binary_delay import Ladder, Topology
from kombu_binary_delay.admin.reading import UNREADABLE_ERRORS, Source, put_back, read
from kombu_binary_delay.admin.redrive import _Sorter
from kombu_binary_delay.model.address import Destination
from kombu_binary_delay.model.delay import LATEST, keep_due
from kombu_binary_delay.model.envelope import HEADERS
from kombu_binary_delay.model.foreign import CELERY, NSERVICEBUS

OURS = Topology(Ladder.binary(12, 1000))
NUMBERS = st.sampled_from([0, 1, -1, 2**31, 2**60, 2**63 - 1, -(2**63), LATEST, LATEST + 1])
TIMES = st.sampled_from(
    ["2030-01-01T00:00:00", "9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+23:59", "9" * 5000]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | NUMBERS
    | TIMES
    | st.floats()
    | st.sampled_from([Decimal("NaN"), Decimal("1e99"), datetime(1, 1, 1), datetime(9999, 12, 31)])  # noqa: DTZ001 - as py-amqp reads them
    | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda each: (
        st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=3), each, max_size=2)
    ),
    max_leaves=6,
)


def table(**known):
    return VALUES | st.fixed_dictionaries({}, optional={**known, "more": VALUES})


KEYS_OF_COPIES = st.lists(VALUES, max_size=3)
DEATH = table(queue=VALUES, exchange=VALUES, **{"routing-keys": KEYS_OF_COPIES})
HEADERS_OF_A_MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "x-binary-delay": table(
            due=NUMBERS, to=KEYS_OF_COPIES, cc=KEYS_OF_COPIES, death=VALUES, expiration=VALUES
        ),
        "x-delay-jitter": VALUES,
        "eta": TIMES | VALUES,
        "task": VALUES,
        "CC": KEYS_OF_COPIES | VALUES,
        "x-death": st.lists(DEATH, max_size=2) | VALUES,
        "x-first-death-exchange": VALUES,
        "x-delivery-count": VALUES,
        "NServiceBus.TimeSent": VALUES,
        "NServiceBus.Transport.RabbitMQ.DelayInSeconds": VALUES,
    },
)
KEYS = st.text(max_size=40) | st.sampled_from(
    ["0.0.1.@..mail", "1." * 12 + "@.events.k", "0." * 27 + "1.mail", "1." * 28, "@..", "0.1.@.%.x"]
)
SOURCES = [
    Source("q"),
    Source("level", OURS, 4000, 2),
    Source("level", CELERY, 1000, 0),
    Source("level", NSERVICEBUS, 8000, 3),
]


@pytest.mark.parametrize("source", SOURCES, ids=lambda each: type(each.topology).__name__)
@given(headers=HEADERS_OF_A_MESSAGE, key=KEYS)
def test_a_message_that_waits_is_read_or_cannot_be_read(source, headers, key):
    now = 1_900_000_000_000
    properties = {HEADERS: headers}

    put_back(source, key, properties, now, "x")
    found = None
    with suppress(*UNREADABLE_ERRORS):
        found = read(source, key, properties, now, lambda _: "")
    if found is not None:
        keep_due(found.properties[HEADERS], found.due)


@given(headers=HEADERS_OF_A_MESSAGE, key=KEYS)
def test_what_is_parked_is_read_whatever_it_says(headers, key):
    message = amqp.Message(b"", application_headers=headers)
    message.delivery_info = {"routing_key": key}
    sorter = _Sorter(OURS, None, None, Destination("", "mail"))  # type: ignore[arg-type] # nothing is asked

    destination, _ = sorter._read(message)  # noqa: SLF001 - without a broker
    assert isinstance(sorter._is_early(message), bool)  # noqa: SLF001 - see above
    assert isinstance(destination, Destination)
