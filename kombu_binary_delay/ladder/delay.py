"""Read the delay that a message's headers ask for. Pure.

* ``x-delay``: milliseconds from now, as for the delayed-message plugin.
* ``eta``: an ISO 8601 time, in a message of Celery's task protocol 2 (one with a ``task`` header).
  Celery writes ``countdown``, ``eta``, retries, beat and canvas to this header.
* ``x-delay-jitter``: milliseconds, the longest time by which a delayed message arrives later, on
  purpose. The message's name decides how much later, see :func:`spread`.
* ``x-delay-expires``: milliseconds after its due time, jitter included, when a delayed message
  expires.

An exchange of the plugin's type does not delay a message that has neither header.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from hashlib import blake2b
from typing import Any

from kombu_binary_delay.errors import DelayError, shown

X_DELAY = "x-delay"
ETA = "eta"
TASK = "task"
ID = "id"
RETRIES = "retries"
#: When a worker discards the task, as ``eta``.
CELERY_EXPIRES = "expires"
#: Celery's task that asks, again and again, whether the parts of a chord have ended.
CHORD_UNLOCK = "celery.chord_unlock"
JITTER = "x-delay-jitter"
EXPIRES = "x-delay-expires"
#: The header that names one message among those with the same key or id. The transport writes it.
GENERATION = "x-delay-generation"
#: The header with the key of a message: of all waiting messages with one key, only the latest runs.
KEY = "x-delay-key"
#: The header with the id of the message that this one is published in place of.
REPLACES = "x-delay-replaces"
#: The exchange type of the delayed-message plugin, and its argument for the underlying type.
PLUGIN_TYPE = "x-delayed-message"
PLUGIN_ARGUMENT = "x-delayed-type"

_WITHOUT = {X_DELAY: "a delay", JITTER: "jitter", EXPIRES: "an expiry"}
#: The latest due time, in milliseconds since the epoch: the end of the year 9999.
LATEST = 253_402_300_799_999
#: A delay in milliseconds that is longer than any ladder.
_TOO_LONG = 10**19
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
#: The end of a day as hour 24, which only Python 3.14 reads: an ``eta`` must mean the same to all.
#: Any character may stand between the date and the time.
_HOUR_24 = re.compile(r"[0-9]{4}(?:-[0-9]{2}-[0-9]{2}|-?W[0-9]{2}(?:-?[0-9])?|[0-9]{4}).24")


def due_time(headers: Mapping[str, Any], now: int, name: str = "") -> int | None:
    """Return when a message is due, in microseconds since the epoch; None if it asks for no delay.

    The unit is that of ``eta``. Rounded to milliseconds, a countdown of eight seconds that is
    published at once would be a little longer than eight, and wait a tick more.
    If both headers ask for a delay, the later time counts. Jitter is added to that.

    :param now: the publisher's clock, in microseconds since the epoch.
    :param name: what decides the jitter of a message that has no task id.
    :raises DelayError: if a header cannot be read, or a time in it is negative. An ``eta`` in the
        past is not an error: time may have passed between the call and the publish, so the message
        is due now.
    """
    due = None
    if headers.get(ETA) is not None and TASK in headers:
        due = _epoch_microseconds(headers[ETA])
    if X_DELAY in headers:
        delay = _microseconds(headers[X_DELAY])
        if delay > 0:
            due = now + delay if due is None else max(due, now + delay)
    if due is not None and JITTER in headers:
        named = headers.get(ID) if TASK in headers else None
        named = named or name
        due += spread(named if isinstance(named, str) else shown(named), jitter_of(headers))
    return due


def bounded(due: int) -> int:
    """Return a due time of another program as one that a clock can show; one in the past as 1970.

    :param due: milliseconds since the epoch.
    :raises DelayError: if it is after the year 9999.
    """
    if due > LATEST:
        raise DelayError(
            f"a due time must be at most {LATEST} ms since the epoch, the end of the year 9999, "
            f"got {due}"
        )
    return max(due, 0)


def jitter_of(headers: Mapping[str, Any]) -> int:
    """Return the jitter that the headers ask for, in microseconds.

    :raises DelayError: if it cannot be read, or is negative.
    """
    return _microseconds(headers[JITTER], JITTER) if JITTER in headers else 0


def expiry_of(headers: Mapping[str, Any], due: int) -> int | None:
    """Return when a message expires, in microseconds since the epoch; None if never.

    :param due: in microseconds since the epoch.
    :raises DelayError: if that cannot be read, or is negative.
    """
    return due + _microseconds(headers[EXPIRES], EXPIRES) if EXPIRES in headers else None


def spread(name: str, jitter: int) -> int:
    """Return how much later than its due time a message arrives: from 0 to less than ``jitter``.

    It is not random: a message that is published again, by whomever, is due at the same time again.
    Names that differ are spread evenly.
    """
    place = int.from_bytes(blake2b(name.encode(errors="replace"), digest_size=8).digest(), "big")
    return place * jitter >> 64


def is_over(delay: object) -> bool:
    """Whether an ``x-delay`` has passed: the plugin negates that of a message it delivers."""
    return isinstance(delay, (int, float)) and delay < 0


def keep_due(headers: dict[str, Any], due: int) -> None:
    """Change, in place, the headers of a message with jitter, so that it has this due time again.

    :param due: milliseconds since the epoch; the jitter is a part of it.
    """
    if headers.pop(JITTER, None) is not None and headers.get(ETA) is not None and TASK in headers:
        headers[ETA] = (_EPOCH + timedelta(milliseconds=due)).isoformat()


def is_retry(headers: Mapping[str, Any]) -> bool:
    """Whether a message is a retry of a Celery task that a worker would keep until it is due."""
    held = TASK in headers and headers.get(ETA) is not None and X_DELAY not in headers
    return held and bool(headers.get(RETRIES))


def plain_exchange(arguments: Mapping[str, Any] | None) -> tuple[str, dict[str, Any]]:
    """Return the type and arguments of the exchange to declare in place of the plugin's.

    :raises DelayError: if ``x-delayed-type`` is missing, or is the plugin's own type.
    """
    rest = dict(arguments or {})
    routes_like = rest.pop(PLUGIN_ARGUMENT, None)
    if not isinstance(routes_like, str) or routes_like in ("", PLUGIN_TYPE):
        raise DelayError(
            f"an exchange of type {PLUGIN_TYPE!r} needs an argument {PLUGIN_ARGUMENT!r} with the "
            f"type to route by, such as 'direct' or 'topic', got {shown(routes_like)}"
        )
    return routes_like, rest


def _microseconds(value: object, header: str = X_DELAY) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _TOO_LONG:
        # The common case.
        return value * 1000
    wrong = DelayError(
        f"{header} must be a number of milliseconds >= 0, got {shown(value)}; "
        f"leave the header out to publish without {_WITHOUT[header]}"
    )
    if isinstance(value, bool) or not isinstance(value, (int, float, str, Decimal)):
        raise wrong
    try:
        delay = Decimal(value)
        if not delay.is_finite() or delay < 0:
            raise wrong
        if delay >= _TOO_LONG:
            raise DelayError(f"{header} of {shown(value)} ms is longer than any ladder; use less")
        return math.ceil(delay * 1000)
    except InvalidOperation:
        raise wrong from None


def _epoch_microseconds(eta: object) -> int:
    time = eta if isinstance(eta, datetime) else _parse(eta)
    if time.tzinfo is None:
        # A Celery worker reads a naive eta as UTC (Request.eta), whatever the timezone setting.
        time = time.replace(tzinfo=UTC)
    return (time - _EPOCH) // _MICROSECOND


def _parse(eta: object) -> datetime:
    if isinstance(eta, str) and not _HOUR_24.match(eta):
        try:
            return datetime.fromisoformat(eta)
        except ValueError:
            pass
    raise DelayError(
        f"{ETA} must be an ISO 8601 time such as '2030-01-31T12:00:00+00:00', got {shown(eta)}"
    )
