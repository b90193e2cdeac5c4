from __future__ import annotations

import pytest
from rich.console import Console

from kombu_binary_delay import Ladder
from kombu_binary_delay.spark.cli.table import FIGURES, show_plan
from kombu_binary_delay.spark.plan import Variant

DEFAULT = Ladder.default()
NAMES = [
    Variant(DEFAULT).name,
    Variant(DEFAULT, queue_per_delay=True).name,
    Variant(DEFAULT, horizon=86400).name,
    Variant(Ladder.binary(), queue_per_delay=True, horizon=86400).name,
]


def shown(width, names, *, allowed):
    figures = {**dict.fromkeys(FIGURES, 9_999_500_000), "hops_per_message": 5.62}
    limit = {"limit": "waiting", "planned": 9_999_500_000.0, "allowed": allowed}
    on = Console(width=width, highlight=False)
    with on.capture() as captured:
        show_plan(
            on,
            [{**figures, "ladder": name} for name in names],
            [{**limit, "ladder": name, "passed": allowed > 1e10} for name in names],
        )
    return captured.get()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_plan_fits_the_terminal_with_the_whole_name_of_each_ladder(width):
    text = shown(width, NAMES, allowed=5e6)
    tables = text[: text.index(" exceeds ")].splitlines()[:-1]
    assert max(map(len, tables)) <= width
    for name in NAMES:
        for part in name.split(", "):
            assert any(part in line for line in tables)
    assert " ".join(text.split()).count("exceeds waiting=5,000,000: 9,999,500,000") == len(NAMES)
    assert text.count("hops_per_message") == {60: 4, 80: 2, 120: 2}[width]


def test_a_plan_within_its_limits_says_which_those_are():
    assert "within the limits: waiting=20,000,000,000" in shown(80, NAMES[:1], allowed=2e10)
