"""The table of cases, on the broker in memory and on a real one, with every ladder."""

from __future__ import annotations

import pytest

from tests.conformance.program import TooSlowError
from tests.conformance.record import BROKER, expected
from tests.conformance.table import LADDERS

#: The column of a broker that is not slow.
FIRST = (BROKER, next(iter(LADDERS)), "quorum")


def marks(column, case):
    """Return the marks of a case: of the columns that only a broker can fill, one is enough."""
    slow = column[0] == BROKER and (column != FIRST or case.restarts)
    return [pytest.mark.slow] * slow + [pytest.mark.own_broker] * case.restarts


@pytest.mark.parametrize(
    ("column", "case"),
    [
        pytest.param(
            column,
            case,
            id=f"{' '.join(column)}: {case.name}",
            marks=marks(column, case),
        )
        for column, case in expected()
    ],
)
def test_it_holds(case, program):
    for factor in (4, 3):
        try:
            case.steps(program)
        except TooSlowError:
            program.begin_again(factor)
        else:
            return
    case.steps(program)
