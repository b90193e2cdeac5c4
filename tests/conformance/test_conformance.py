"""The table of cases, on the walk of the topology and on the broker, with every ladder."""

from __future__ import annotations

import pytest

from tests.conformance.program import TooSlowError
from tests.conformance.record import expected


@pytest.mark.parametrize(
    ("column", "case"),
    [
        pytest.param(
            column,
            case,
            id=f"{' '.join(column)}: {case.name}",
            marks=[pytest.mark.own_broker, pytest.mark.slow] if case.restarts else [],
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
