"""The demo's verdict is only as good as its accounts."""

from __future__ import annotations

from dev.demo_count import Accounts, Spread


def accounts(text: str) -> Accounts:
    counted = Accounts(due={"a": 10.0, "b": 20.0, "c": 30.0, "far": 99999.0}, far={"far"})
    counted.read(text)
    return counted


def test_all_is_well_when_each_task_came_once_and_not_before_it_was_due() -> None:
    counted = accounts("a 10.1\nb 20.0\nc 32\n")
    assert (counted.missing, counted.duplicated, counted.early) == (0, 0, 0)
    assert counted.lateness({"c"}) == Spread((2.0,))


def test_what_did_not_come_is_missing_and_what_is_due_later_is_not() -> None:
    assert accounts("a 10.1\n").missing == 2


def test_a_second_arrival_is_a_duplicate_and_the_first_one_counts() -> None:
    counted = accounts("a 11\na 50\na 60\n")
    assert counted.duplicated == 2
    assert counted.lateness() == Spread((1.0,))


def test_an_arrival_before_the_due_time_is_early() -> None:
    assert accounts("a 9.999\nb 20.001\n").early == 1


def test_a_line_that_is_still_being_written_does_not_count_yet() -> None:
    assert accounts("a 10.1\nb 20").missing == 2


def test_a_spread_tells_median_99th_percentile_and_maximum() -> None:
    spread = Spread(tuple(n / 1000 for n in range(1, 1001)))
    assert str(spread) == "501 ms / 991 ms / 1 s"
    assert str(Spread(())) == "none"
