"""A delay is a number in a positional system."""

import re
from math import prod

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from kombu_binary_delay import DelayError, Ladder, LadderError
from kombu_binary_delay.ladder.ladder import MAX_DIGITS, MAX_QUEUES, MAX_WAIT, hops


def test_the_default_ladder_and_the_binary_one_reach_eight_and_a_half_years():
    for ladder in (Ladder.default(), Ladder.binary()):
        assert ladder.maximum == (2**31 - 1) * 125
        assert ladder.maximum >= 8.5 * 365.25 * 86_400_000

    assert set(Ladder.binary().radices) == {2}


def test_the_default_ladder_waits_little_for_short_delays_with_few_queues_for_long_ones():
    assert Ladder.default().name == "125ms-2x8-4x4-16x3-8x1"
    assert sum(radix - 1 for radix in Ladder.default().radices) == 72
    # Another tick has the same lowest levels, and as many high ones as it needs or may have.
    assert Ladder.default(tick=1000).name == "1000ms-2x6-4x4-16x3-8x1"
    assert Ladder.default(tick=20_000).name == "20000ms-2x1-4x4-16x3-8x1"
    assert Ladder.default(3).radices == (16, 16, 8)


@pytest.mark.parametrize(
    ("ladder", "delay", "digits"),
    [
        # 80 ticks: three bits, then four a level.
        (Ladder.default(), 10_000, "1010 000"),
        (Ladder.default(), 45_000, "0010 1101 000"),
        (Ladder.uniform(8), 10_000, "001 010 000"),
        # Ten seconds on four levels of one second: eight, then two.
        (Ladder.binary(4, 1000), 10_000, "1 0 1 0"),
        # Radix 4 with a smallest delay of two seconds: 255 s round up to 2 * 128 s.
        (Ladder(2000, (4, 4, 4, 4)), 255_000, "10 00 00 00"),
        # A mixed radix counts like minutes and hours.
        (Ladder(1000, (24, 60, 60)), 3_661_000, "00001 000001 000001"),
        (Ladder.uniform(10, 3, 1000), 905_000, "1001 0000 0101"),
        (Ladder.binary(3, 125), 1, "1"),
        (Ladder.binary(3, 125), 0, ""),
        (Ladder.binary(3, 125), 125.001, "1 0"),
        (Ladder.binary(3, 125), 875, "1 1 1"),
    ],
)
def test_a_delay_is_written_in_bits_rounded_up_to_ticks(ladder, delay, digits):
    assert ladder.digits(delay) == tuple(digits.split())
    assert hops(ladder.digits(delay)) == sum(int(word, 2) > 0 for word in digits.split())


@pytest.mark.parametrize(
    ("delay", "words"),
    [
        (-1, "a delay of -1 ms is not 0 or more"),
        (float("nan"), "a delay of nan ms is not 0 or more"),
        (
            875.001,
            "a delay of 875.001 ms is longer than 875 ms, the longest of the ladder 125ms-2x3",
        ),
        (9000 * 86_400_000, "a delay of 24.7 years is longer than 875 ms"),
        (float("inf"), "a delay of inf years is longer than 875 ms"),
    ],
)
def test_a_delay_outside_the_ladder_is_refused_by_name(delay, words):
    with pytest.raises(DelayError, match=re.escape(words)):
        Ladder.binary(3, 125).digits(delay)


@pytest.mark.parametrize(
    ("tick", "radices", "complaint"),
    [
        (125, (), "at least one level"),
        (125, (2, 1), "radix .* >= 2, got 1"),
        (125, (2, 2.0), "radix .* got 2.0"),
        (0, (2,), "tick .* >= 1, got 0"),
        (True, (2,), "tick"),
        (1.5, (2,), "tick"),
        (MAX_WAIT + 1, (2,), "x-message-ttl"),
        (MAX_WAIT // 2, (4,), "x-message-ttl"),
        (1, (2,) * 40, "level 39 .*x-message-ttl.*fewer levels"),
        (1, (2,) * 10_000, "fewer levels"),
        (1, (2**10_000,), "fewer levels"),
        (1, (11,) * 27, "fewer levels"),
        (1, (10_002,), "at most 10000 queues, .* 10001; .*lower radices"),
        (1, (9000, 1003), "at most 10000 queues"),
    ],
)
def test_a_ladder_that_cannot_be_is_refused_by_name(tick, radices, complaint):
    with pytest.raises(LadderError, match=complaint):
        Ladder(tick, radices)


@pytest.mark.parametrize(
    ("radix", "tick", "name"),
    [
        (2, 125, "125ms-2x31"),
        (4, 125, "125ms-2x1-4x15"),
        (8, 125, "125ms-2x1-8x10"),
        (10, 125, "125ms-3x1-10x9"),
        (2, 1, "1ms-2x31"),
        # A level more would wait longer than RabbitMQ lets a message wait.
        (2, 1000, "1000ms-2x29"),
        (4, 500, "500ms-3x1-4x14"),
        (4, 1000, "1000ms-2x1-4x14"),
        (3, 2000, "2000ms-2x1-3x17"),
    ],
)
def test_a_ladder_reaches_the_default_range_and_not_much_more_or_what_rabbitmq_can_have(
    radix, tick, name
):
    ladder = Ladder.uniform(radix, tick=tick)

    assert ladder.name == name
    assert ladder.maximum >= (2**31 - 1) * tick or ladder.maximum + tick > MAX_WAIT


@pytest.mark.parametrize("levels", [0, -1, 2.5, "4"])
def test_a_binary_ladder_needs_a_whole_number_of_levels(levels):
    with pytest.raises(LadderError):
        Ladder.binary(levels)


@pytest.mark.parametrize("digits", ["01 00 00 00", "11 00 00", "1 00", "001 00", "0 00", "0- 00"])
def test_digits_of_another_ladder_are_refused(digits):
    with pytest.raises(LadderError):
        Ladder(1, (3, 4, 4)).delay(tuple(digits.split()))


@given(st.lists(st.sampled_from([2, 2, 2, 3, 4, 5, 9, 60, 2**13]), min_size=1, max_size=39))
@example([2] * 39)
@example([3] + [2] * 37)
def test_the_digits_of_every_ladder_that_rabbitmq_can_time_fit_into_a_key(radices):
    highest, *lower = radices
    assume((highest - 1) * prod(lower) <= MAX_WAIT)
    assume(sum(radices) <= MAX_QUEUES)

    longest = Ladder(1, tuple(radices)).digits((prod(radices)) - 1)

    assert sum(len(word) + 1 for word in longest) <= MAX_DIGITS


def test_a_ladder_is_its_name():
    ladder = Ladder(2000, (4, 4, 2, 10))

    assert ladder.name == "2000ms-4x2-2x1-10x1"
    assert Ladder.from_name(ladder.name) == ladder


@pytest.mark.parametrize(
    "name", ["", "125ms", "125ms-2x0", "0ms-2x1", "125ms-2x1-", "1ms-2x999999"]
)
def test_what_is_no_name_of_a_ladder_is_refused(name):
    with pytest.raises(LadderError):
        Ladder.from_name(name)


def test_a_delay_that_is_a_little_too_long_is_refused_to_the_millisecond():
    ladder = Ladder.default()

    with pytest.raises(DelayError, match="268435455876 ms is longer than 268435455875 ms"):
        ladder.digits(ladder.maximum + 1)


@pytest.mark.parametrize(("years", "is_proposed"), [(12, True), (30, False)])
def test_more_levels_are_proposed_only_if_a_ladder_can_have_them(years, is_proposed):
    with pytest.raises(DelayError) as refused:
        Ladder.default().digits(years * 31_536_000_000)
    assert ("or a ladder with more levels" in str(refused.value)) == is_proposed
