"""Which tests run side by side."""

from __future__ import annotations

from tests.side_by_side import OWNER, unit


def test_only_one_unit_starts_a_broker_that_no_other_test_uses(request):
    """Of the tests that this session has collected: all, in a whole run."""
    takers = [item for item in request.session.items if "own_broker" in item.fixturenames]

    # Each of the others may be in another worker, which would start one, and keep it.
    assert [test.nodeid for test in takers if unit(test.nodeid) != OWNER] == []
