"""All cases, in the order of the table in the documentation; one subject a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.conformance.cases import broker, delays, destinations, meanwhile, message

if TYPE_CHECKING:
    from tests.conformance.table import Case

CASES: list[Case] = [
    *destinations.table,
    *delays.table,
    *message.table,
    *meanwhile.table,
    *broker.table,
]
