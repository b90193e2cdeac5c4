"""Name what supersedes other messages, and record it once it is published.

A message with a key or a replaced id gets a generation. Its records are written after its publish:
if that fails, what it would supersede runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kombu_binary_delay.errors import AmendmentError
from kombu_binary_delay.ladder.delay import RETRIES, TASK, is_retry
from kombu_binary_delay.ladder.envelope import HEADERS
from kombu_binary_delay.settings import milliseconds

from .parts import KEYS_MAX_AGE
from .record import (
    GENERATION,
    KEY,
    LONGEST_WAIT,
    REPLACES,
    Supersede,
    check_name,
    check_wait,
    new_generation,
)
from .stream import Amendments

#: The longest delay of a message with a key, in milliseconds: half the time its record is kept.
LONGEST_KEYED = milliseconds(KEYS_MAX_AGE) // 2


class Generations:
    """What the messages of one connection supersede, for :class:`.publishing.way_out.WayOut`."""

    def __init__(self, amendments: Amendments) -> None:
        self._amendments = amendments

    @staticmethod
    def supersedes(headers: Mapping[str, Any]) -> bool:
        """Return whether a message with these headers supersedes others; a retry does not."""
        if not (KEY in headers or REPLACES in headers) or GENERATION in headers:
            return False
        # A retry has the generation of its task. That has none if its publisher was without this
        # transport, and is older than whatever has one by now.
        return REPLACES in headers or not (TASK in headers and headers.get(RETRIES))

    def named(
        self, properties: dict[str, Any], now: int, *, in_transaction: bool
    ) -> dict[str, Any]:
        """Return the properties of a message that supersedes others, with a new generation.

        :param now: microseconds since the epoch.
        :raises AmendmentError: if that cannot be recorded here, or its headers are invalid.
        """
        self._amendments.require()
        if in_transaction:
            raise AmendmentError(
                f"a message with {KEY} or {REPLACES} cannot be published in a transaction, since "
                f"its record cannot be rolled back; publish it on a channel without tx_select"
            )
        headers = properties[HEADERS]
        if check_wait(headers.get(LONGEST_WAIT)) is not None and KEY not in headers:
            raise AmendmentError(f"{LONGEST_WAIT} needs {KEY}, which this message does not have")
        return {**properties, HEADERS: {**headers, GENERATION: new_generation(now // 1000)}}

    def records(
        self,
        properties: Mapping[str, Any],
        due: int | None,
        now: int,
        check: Callable[[], object],
    ) -> list[Supersede]:
        """Return the records for :meth:`write`, having checked that they can be written.

        :param properties: of :meth:`named`.
        :param due: microseconds since the epoch; None if it is not delayed.
        :param now: as of :meth:`named`.
        :param check: raises an error if the message cannot be delayed to its destination. What is
            refused then has declared nothing.
        :raises AmendmentError: if a name or the delay is invalid, or the broker or user cannot
            amend.
        """
        headers, at = properties[HEADERS], now // 1000
        wait = check_wait(headers.get(LONGEST_WAIT))
        if not (self._amendments.is_checked or is_retry(headers)):
            # Later, the plan of the publish is soon enough.
            check()
        ends = -(-(due or now) // 1000)
        longest = max(ends - at, wait or 0)
        if KEY in headers and longest > LONGEST_KEYED:
            raise AmendmentError(
                f"a message with {KEY} can wait for at most {LONGEST_KEYED // 1000} s, got "
                f"{longest / 1000:g} s; give it an id, and replace it by its id"
            )
        generation = headers[GENERATION]
        records = [
            Supersede(check_name(headers[name], name), generation, ends, at, limit, keyed=keyed)
            for name, limit, keyed in ((KEY, wait, True), (REPLACES, None, False))
            if name in headers
        ]
        self._amendments.prepare()
        return records

    def write(self, records: Sequence[Supersede]) -> None:
        """Record what published messages supersede.

        :raises AmendmentError: if the broker does not take the records.
        """
        try:
            self._amendments.write(records)
        except AmendmentError as exc:
            names = ", ".join(repr(record.name) for record in records[:3])
            raise AmendmentError(
                f"{len(records)} messages were published, but not recorded, so the messages that "
                f"they supersede are delivered as well ({names}): {exc}"
            ) from exc
