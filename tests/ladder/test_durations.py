"""Durations, as all that people read writes them."""

import pytest

from kombu_binary_delay.ladder.durations import ahead, human


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.125, "125 ms"),
        (1.125, "1.125 s"),
        (60, "1 min"),
        (96, "96 s"),
        (90, "1.5 min"),
        (2048, "34.1 min"),
        (3600.125, "1 h"),
        (131_072, "36.4 h"),
        (31_536_000, "1 year"),
        (134_217_728, "4.26 years"),
        (10_000 * 31_536_000, "10000 years"),
    ],
)
def test_a_time_is_written_in_the_unit_that_suits_it(seconds, text):
    assert human(seconds * 1000) == text


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [(8_125, "in 8 s"), (499, "now"), (-499, "now"), (-5_400_000, "1.5 h ago")],
)
def test_a_time_is_so_far_from_now_in_whole_seconds(milliseconds, text):
    assert ahead(milliseconds) == text
