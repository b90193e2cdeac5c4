"""Whether due messages are held up, or are a herd on its way, from the broker's samples."""

from __future__ import annotations

import pytest

from kombu_binary_delay.operate.snapshot import is_held_up

NAMES = ("messages", "messages_ready", "messages_unacknowledged")


def row(held: int, *samples: tuple[int, int]):
    """A queue with so many due messages now, and samples of all and of those that wait."""
    series = [[total for total, _ in samples], [ready for _, ready in samples], [0] * len(samples)]
    details = {
        f"{name}_details": {"samples": [{"sample": sample} for sample in one]}
        for name, one in zip(NAMES, series, strict=True)
    }
    return {"messages_dlx": held, **(details if samples else {})}


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        pytest.param(row(31), False, id="the worker has room"),
        pytest.param(row(32), True, id="a broker that samples nothing"),
        pytest.param(row(600, *[(600, 0)] * 5, (0, 0)), True, id="nothing leaves"),
        pytest.param(
            row(900, (950, 50), (800, 0), (700, 10), (600, 0), (0, 0)), True, id="more become due"
        ),
        pytest.param(row(600, *[(600, 0)] * 3, (0, 0)), False, id="not for long"),
        pytest.param(
            row(500, (600, 100), (600, 100), (30, 10), (30, 10)), False, id="it had room just now"
        ),
        # As seen while 40,000 and 60,000 messages that were due in one second were released.
        pytest.param(
            row(5663, (5663, 0), (5663, 0), (7340, 0), (10400, 10400), (0, 0)),
            False,
            id="a herd, sampled twice",
        ),
        pytest.param(
            row(2231, (26231, 24000), (26231, 24000), (33000, 33000), (33000, 33000)),
            False,
            id="a herd's first messages",
        ),
        pytest.param(
            row(1000, (1000, 0), (3000, 0), (3000, 0), (5000, 0), (7000, 0)), False, id="a herd"
        ),
    ],
)
def test_what_is_due_is_held_up_only_if_none_of_it_leaves(figures, expected):
    assert is_held_up(figures) is expected
