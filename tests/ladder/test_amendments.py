"""What becomes of a message that arrives, decided without a broker: drop, postpone or pass."""

from __future__ import annotations

import json
import sys
import tracemalloc
from collections.abc import Callable
from itertools import pairwise, product
from random import Random
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kombu_binary_delay.amendments import names as names_module
from kombu_binary_delay.amendments.generations import Generations
from kombu_binary_delay.amendments.memory import CANCELLED, POSTPONED, SUPERSEDED, Fate, Memory
from kombu_binary_delay.amendments.record import (
    GENERATION,
    KEY,
    LONGEST_WAIT,
    MAX_BYTES,
    MAX_IDS,
    MAX_TIME,
    NESTING,
    REPLACES,
    Cancel,
    CancelStamped,
    Postpone,
    Record,
    Supersede,
    from_line,
    judged_by,
    new_generation,
    split,
    to_line,
)
from kombu_binary_delay.celery_side.tasks import as_resent, with_own_nested

DAY = 86_400_000
NOW = 1_800_000_000_000


def message(name: str = "", **headers: Any) -> dict[str, Any]:
    return {"message_id": name, "application_headers": headers}


def keyed(key: str, generation: str, name: str = "") -> dict[str, Any]:
    return message(name, **{KEY: key, GENERATION: generation})


def read(*records: Record, now: int = NOW) -> Memory:
    memory = Memory(31 * DAY)
    for record in records:
        memory.learn(record, now)
    return memory


def recorded(properties: dict[str, Any]) -> dict[str, Any]:
    """Return what the journal has of a message."""
    headers = properties.get("application_headers") or {}
    named = {name: headers[name] for name in ("id", "task") if name in headers}
    judged = json.loads(json.dumps(judged_by(headers)))
    return {**properties, "application_headers": {**named, **judged}}


def reason(memory: Memory, properties: dict[str, Any], now: int = NOW) -> str | None:
    fate = memory.judge(properties, now)
    assert memory.judge(recorded(properties), now) == fate
    return fate and fate.reason


# -- records -----------------------------------------------------------------------------------

names = st.text(min_size=1, max_size=20)
times = st.integers(0, MAX_TIME)
records: st.SearchStrategy[Record] = st.one_of(
    st.builds(Cancel, st.lists(names).map(tuple), times, st.none() | times, st.booleans()),
    st.builds(
        CancelStamped,
        st.dictionaries(names, st.lists(names).map(tuple)).map(
            lambda stamps: tuple(stamps.items())
        ),
        times,
    ),
    st.builds(Postpone, names, times, times),
    st.builds(Supersede, names, names, times, times, st.none() | times, st.booleans()),
)


@given(records)
def test_a_record_is_read_as_it_was_written(record):
    assert from_line(to_line(record)) == record


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
WORDS = ("cancel", "cancel_stamped", "postpone", "supersede", "by", "due", "at", "longest_wait")


@given(st.dictionaries(st.sampled_from(WORDS), JSON | names | times).map(json.dumps) | st.binary())
def test_what_somebody_forged_is_a_record_that_can_be_learned_or_none(line):
    record = from_line(line)
    memory = Memory(DAY)
    if record is not None:
        memory.learn(record, NOW)
    assert memory.judge(message("somebody-else's"), NOW) is None or (
        record is not None and "somebody-else's" in str(record)
    )


@pytest.mark.parametrize(
    "line",
    [b"", b"null", b"[]", b"{}", b'{"at":1}', b"\xff", b'{"cancel":["a"],"at":true}', b"[" * 10**5],
    ids=repr,
)
def test_what_is_no_record_is_ignored(line):
    assert from_line(line[:MAX_BYTES]) is None


def test_a_record_that_is_too_large_is_ignored():
    line = json.dumps({"cancel": ["a" * MAX_BYTES], "at": NOW})
    assert from_line(line) is None


@given(st.lists(names, max_size=3 * MAX_IDS))
@settings(max_examples=10)
def test_many_ids_are_split_into_records_that_name_each_once(ids):
    records = split(ids, NOW)
    assert [name for record in records for name in record.names] == list(dict.fromkeys(ids))
    assert all(0 < len(record.names) <= MAX_IDS for record in records)


# -- cancel ------------------------------------------------------------------------------------

STAMPED = {"stamped_headers": ["group"], "stamps": {"group": ["7", "8"]}}


@pytest.mark.parametrize(
    ("record", "properties", "expected"),
    [
        (Cancel(("a",), NOW), message("a"), CANCELLED),
        (Cancel(("a",), NOW), message("b"), None),
        (Cancel(("a",), NOW), message("b", id="a", task="t"), CANCELLED),
        (Cancel(("a",), NOW), {"correlation_id": "a", "reply_to": "b"}, CANCELLED),
        # A reply, such as the result of a task.
        (Cancel(("a",), NOW), {"correlation_id": "a"}, None),
        (Cancel(("a",), NOW), message("a", id="b", task="t"), None),
        (Cancel(("a",), NOW), {}, None),
        (CancelStamped((("group", ("7",)),), NOW), message("x", **STAMPED), CANCELLED),
        (CancelStamped((("group", ("9",)),), NOW), message("x", **STAMPED), None),
        (CancelStamped((("group", ("7",)),), NOW), message("x"), None),
        (CancelStamped((("group", ("7",)),), NOW), message("x", stamps={"group": 7}), CANCELLED),
        (CancelStamped((("group", ("7",)),), NOW), message("x", stamps=[1]), None),
        (Postpone("a", NOW + 5, NOW), message("a"), POSTPONED),
        (Postpone("a", NOW, NOW), message("a"), None),
        (Postpone("a", NOW + 5, NOW), message("b"), None),
    ],
)
def test_a_message_is_amended_by_its_id_or_stamps_and_no_other(record, properties, expected):
    assert reason(read(record), properties) == expected


@pytest.mark.parametrize(
    ("due", "remembered_until"),
    [(None, NOW + 31 * DAY), (NOW + 90 * DAY, NOW + 121 * DAY)],
    ids=["by id alone", "with its due time"],
)
def test_a_cancellation_is_remembered_for_as_long_as_it_says(due, remembered_until):
    memory = read(Cancel(("a",), NOW, due))
    assert reason(memory, message("a"), remembered_until - 1) == CANCELLED
    assert reason(memory, message("a"), remembered_until) is None
    memory.learn(Cancel(("b",), remembered_until), remembered_until)
    assert len(memory) == 1


def test_a_record_from_next_year_is_remembered_no_longer_than_one_of_now():
    memory = read(Cancel(("a",), NOW + 365 * DAY))
    assert reason(memory, message("a"), NOW + 31 * DAY) is None


def test_a_cancelled_id_takes_little_memory():
    lines = [to_line(Cancel((str(uuid4()),), NOW - age)) for age in range(10_000)]
    tracemalloc.start()
    try:
        memory = Memory(31 * DAY)
        for line in lines:
            record = from_line(line)
            assert record
            memory.learn(record, NOW)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The id itself takes 85, and its place in a dict up to 30.
    assert used / len(memory) < 120


# -- one generation is valid -------------------------------------------------------------------


def superseding(name: str, number: int, at: int, due: int, wait: int | None = None) -> Supersede:
    """Supersede what has a key."""
    return Supersede(name, f"{at:x}-{number}", due, at, wait, keyed=True)


def replacing(name: str, number: int, at: int, due: int) -> Supersede:
    return Supersede(name, f"{at:x}-{number}", due, at)


def test_of_all_with_one_key_only_the_latest_runs():
    published = [
        superseding("doc", number, NOW + number, NOW + 5000 + number) for number in range(20)
    ]
    memory = read(*published)
    reasons = [reason(memory, keyed("doc", record.generation)) for record in published]
    assert reasons == [SUPERSEDED] * 19 + [None]


def test_what_replaces_a_task_runs_and_what_it_replaces_does_not():
    new = replacing("a", 1, NOW, NOW + 5)
    memory = read(new)
    replaces = message("a", **{REPLACES: "a", GENERATION: new.generation})
    assert reason(memory, message("a")) == SUPERSEDED
    assert reason(memory, replaces) is None
    memory.learn(Cancel(("a",), NOW), NOW)
    assert reason(memory, replaces) == CANCELLED


def test_a_task_that_replaces_itself_goes_on_under_the_id_that_was_replaced():
    memory = read(replacing("a", 1, NOW, NOW + 5))
    its_own = message("a", id="a", task="t", replaced_task_nesting=1)
    assert reason(memory, message("a", id="a", task="t", replaced_task_nesting=0)) == SUPERSEDED
    assert reason(memory, its_own) is None
    memory.learn(Cancel(("a",), NOW), NOW)
    assert reason(memory, its_own) == CANCELLED


def test_what_replaces_a_cancelled_task_runs():
    new = replacing("a", 1, NOW, NOW + 5)
    memory = read(Cancel(("a",), NOW), Postpone("a", NOW + 9, NOW), new)
    replaces = message("a", **{REPLACES: "a", GENERATION: new.generation})
    assert reason(memory, replaces) is None
    assert memory.revives(replaces, NOW)
    assert reason(memory, message("a")) == SUPERSEDED
    assert not memory.revives(message("a"), NOW)
    memory.learn(Cancel(("a",), NOW), NOW)
    assert not memory.revives(replaces, NOW)


@pytest.mark.parametrize("came_by_ladder", [False, True])
def test_who_reads_a_cancellation_late_knows_it_as_long_as_what_it_cancelled(came_by_ladder):
    """The replacement is due in 60 days, and its cancellation was written half a minute later."""
    new = replacing("a", 1, NOW, NOW + 60 * DAY)
    late = NOW + 40 * DAY
    memory = read(new, Cancel(("a", "b"), NOW + 30_000), now=late)
    if came_by_ladder:
        memory.learn(
            Cancel(("a",), NOW + 30_000, NOW + 60 * DAY), NOW + 59 * DAY, came_by_ladder=True
        )
    replaces = message("a", **{REPLACES: "a", GENERATION: new.generation})
    assert reason(memory, replaces, NOW + 60 * DAY) == CANCELLED
    assert reason(memory, message("b"), late) is None


def test_a_cancellation_from_the_ladder_spares_what_has_replaced_the_task_since():
    new = replacing("a", 1, NOW, NOW + 5)
    replaces = message("a", **{REPLACES: "a", GENERATION: new.generation})
    memory = read(new)
    memory.learn(Cancel(("a", "b"), NOW - 1), NOW, came_by_ladder=True)
    assert reason(memory, replaces) is None
    assert reason(memory, message("b")) == CANCELLED
    # The clock of who cancelled may have been ahead.
    memory.learn(Cancel(("a",), NOW + 59_000), NOW + DAY, came_by_ladder=True)
    assert reason(memory, replaces) is None
    memory.learn(Cancel(("a",), NOW + 60_000), NOW + DAY, came_by_ladder=True)
    assert reason(memory, replaces) == CANCELLED


def test_what_replaces_a_task_that_was_not_cancelled_revives_nothing():
    new = replacing("a", 1, NOW, NOW + 5)
    assert not read(new).revives(message("a", **{REPLACES: "a", GENERATION: new.generation}), NOW)


def test_what_replaces_a_task_awaits_its_record_until_that_was_read():
    old, new = replacing("a", 1, NOW, NOW + 5), replacing("a", 2, NOW, NOW + 5)
    by_old, by_new = (
        message("a", **{REPLACES: "a", GENERATION: record.generation}) for record in (old, new)
    )
    memory = read(Cancel(("a",), NOW))
    assert memory.awaits_record(by_old, NOW)
    assert reason(memory, by_old) is None
    assert memory.revives(by_old, NOW)
    assert not memory.awaits_record(by_old, NOW + DAY)
    assert reason(memory, by_old, NOW + DAY) is None
    assert not memory.awaits_record(message("a"), NOW)
    memory.learn(old, NOW)
    memory.learn(new, NOW)
    assert not memory.awaits_record(by_old, NOW)
    assert not memory.awaits_record(by_new, NOW)


@pytest.mark.parametrize("due", [None, NOW + 40 * DAY])
@pytest.mark.parametrize(
    ("cancelled", "expected"),
    # By a minute, it cannot know which was first.
    [(-DAY, None), (-1, None), (50_000, None), (130_000, CANCELLED), (DAY, CANCELLED)],
)
def test_without_its_record_a_replacement_runs_if_it_came_after_the_cancellation(
    due, cancelled, expected
):
    new = replacing("a", 1, NOW, NOW + 30 * DAY)
    memory = read(Cancel(("a",), NOW + cancelled, due), now=NOW + max(cancelled, 0))
    properties = message("a", **{REPLACES: "a", GENERATION: new.generation})
    assert reason(memory, properties, NOW + 29 * DAY) == expected


@pytest.mark.parametrize(
    ("claimed", "expected", "awaits"),
    [
        (NOW + 60_000, None, True),
        # The clock of its publisher may be ahead: its record is waited for.
        (NOW + 60_001, CANCELLED, True),
        (MAX_TIME, CANCELLED, True),
        (MAX_TIME + 1, CANCELLED, False),
        (10**400, CANCELLED, False),
    ],
)
def test_without_its_record_a_replacement_from_the_future_is_cancelled(claimed, expected, awaits):
    memory = read(Cancel(("a",), NOW))
    forged = message("a", **{REPLACES: "a", GENERATION: f"{claimed:x}-0"})
    assert memory.awaits_record(forged, NOW) == awaits
    assert reason(memory, forged) == expected
    assert memory.revives(forged, NOW) == (expected is None)
    memory.learn(Supersede("a", f"{claimed:x}-0", NOW + 5, NOW), NOW)
    assert reason(memory, forged) is None


def test_the_record_of_a_writer_whose_clock_is_ahead_makes_nothing_else_look_old():
    ahead = NOW + 30 * DAY
    memory = read(replacing("a", 1, ahead, ahead), superseding("doc", 1, ahead, ahead))
    memory.learn(Cancel(("a",), NOW + 120_000), NOW + DAY, came_by_ladder=True)
    replaces = message("a", **{REPLACES: "a", GENERATION: f"{ahead:x}-1"})
    assert reason(memory, replaces, NOW + DAY) == CANCELLED
    # Its record was never written.
    assert reason(memory, keyed("doc", f"{NOW + 1:x}-2"), NOW + DAY) is None


def test_an_id_and_a_key_may_be_the_same_word():
    new = superseding("a", 1, NOW, NOW + 5)
    memory = read(new, Cancel(("a",), NOW))
    assert reason(memory, keyed("a", new.generation)) is None
    assert reason(memory, message("a")) == CANCELLED
    memory = read(new, Cancel(("a",), NOW, keyed=True))
    assert memory.judge(keyed("a", new.generation), NOW) == Fate(CANCELLED, by_key=True)
    assert reason(memory, message("a")) is None


def test_what_has_a_key_is_replaced_by_its_id():
    first, new = superseding("k", 1, NOW, NOW + 5), replacing("a", 2, NOW, NOW + 5)
    memory = read(first, new)
    assert memory.judge(keyed("k", first.generation, "a"), NOW) == Fate(SUPERSEDED)


@pytest.mark.parametrize("position", range(3))
def test_what_has_a_key_and_replaces_an_id_is_judged_by_both(position):
    old, new = superseding("k", 1, NOW, NOW + 5), superseding("k", 2, NOW, NOW + 5)
    records = [old, new]
    # Of the stream of ids.
    records.insert(position, Supersede("a", old.generation, NOW + 5, NOW))
    memory = read(*records)
    by_both = message("b", **{KEY: "k", REPLACES: "a", GENERATION: old.generation})
    assert memory.judge(message("a"), NOW) == Fate(SUPERSEDED)
    assert memory.judge(by_both, NOW) == Fate(SUPERSEDED, by_key=True)
    assert reason(memory, keyed("k", new.generation)) is None


def test_what_replaces_a_task_under_another_id_is_replaced_by_that():
    first, second = replacing("a", 1, NOW, NOW + 5), replacing("b", 2, NOW, NOW + 5)
    memory = read(first, second)
    by_first = message("b", **{REPLACES: "a", GENERATION: first.generation})
    assert reason(memory, by_first) == SUPERSEDED
    by_second = message("c", **{REPLACES: "b", GENERATION: second.generation})
    assert reason(memory, by_second) is None


def test_a_key_is_remembered_for_no_longer_than_its_stream_keeps_it():
    memory = read(superseding("doc", 1, NOW, NOW + 5))
    memory.learn(Cancel(("x",), NOW + DAY), NOW + DAY + 60_005)
    assert len(memory) == 1


def test_the_order_of_the_stream_counts_and_not_the_publishers_clocks():
    early, late = superseding("doc", 1, NOW, NOW + 9), superseding("doc", 2, NOW - 60_000, NOW + 9)
    memory = read(early, late)
    assert reason(memory, keyed("doc", early.generation)) == SUPERSEDED
    assert reason(memory, keyed("doc", late.generation)) is None


def test_a_generation_whose_record_is_still_to_be_read_passes():
    memory = read(superseding("doc", 1, NOW, NOW + 9))
    slow_clock = f"{NOW - 60_000:x}-new"
    assert reason(memory, keyed("doc", slow_clock)) is None


def test_after_an_outage_a_superseded_generation_is_still_known_by_its_time():
    # In the same millisecond as the valid one, at the latest.
    old, new = superseding("doc", 1, NOW, NOW + 5), superseding("doc", 2, NOW, NOW + 6)
    memory = read(old, new)
    later = NOW + DAY
    memory.learn(Cancel(("x",), later), later)
    assert reason(memory, keyed("doc", old.generation), later) == SUPERSEDED
    assert reason(memory, keyed("doc", new.generation), later) is None


def test_a_steady_stream_of_events_starves_nobody_who_set_a_longest_wait():
    """An event a second, each put off by 5 s, and the first by no more than 20 s."""
    published = [
        superseding("doc", number, NOW + number * 1000, NOW + number * 1000 + 5000, 20_000)
        for number in range(60)
    ]
    memory = Memory(DAY)
    for record in published:
        memory.learn(record, record.at)
    ran = [
        record.due - NOW
        for record in published
        if reason(memory, keyed("doc", record.generation), record.due) is None
    ]
    assert all(later - sooner <= 21_000 for sooner, later in pairwise(ran))
    assert ran[0] <= 20_000
    assert ran[-1] == published[-1].due - NOW
    assert len(ran) <= 5


def test_a_key_that_a_stock_publisher_wrote_is_not_taken_for_an_old_message():
    memory = read(superseding("doc", 1, NOW, NOW + 9))
    assert reason(memory, message("doc", **{KEY: "doc"})) is None


def test_a_postponed_task_that_was_replaced_goes_by_the_new_time():
    new = replacing("a", 1, NOW, NOW + 5)
    memory = read(Postpone("a", NOW + DAY, NOW), new)
    assert reason(memory, message("a", **{REPLACES: "a", GENERATION: new.generation})) is None


def test_a_memory_takes_over_what_its_stream_has_lost():
    old, new = superseding("doc", 1, NOW, NOW + 5), superseding("doc", 2, NOW + 1, NOW + 6)
    before = read(Cancel(("a", "b"), NOW), old, new, Postpone("p", NOW + 9, NOW))
    again = replacing("b", 3, NOW, NOW + 5)
    memory = read(again)
    memory.inherit(before, NOW)
    assert reason(memory, message("a")) == CANCELLED
    assert reason(memory, message("p")) == POSTPONED
    assert reason(memory, keyed("doc", old.generation)) == SUPERSEDED
    assert reason(memory, keyed("doc", new.generation)) is None
    assert reason(memory, message("b", **{REPLACES: "b", GENERATION: again.generation})) is None


def test_what_was_cancelled_or_replaced_stays_so_where_a_new_stream_only_postpones_it():
    new = replacing("b", 1, NOW, NOW + 5)
    later = [Postpone(name, NOW + 9, NOW + 1) for name in ("a", "b", "c")]
    memory = read(*later)
    memory.inherit(read(Cancel(("a", "c"), NOW), new, Postpone("c", NOW + 5, NOW)), NOW)
    by_new = message("b", **{REPLACES: "b", GENERATION: new.generation})
    assert [reason(memory, message(name)) for name in "abc"] == [CANCELLED, SUPERSEDED, CANCELLED]
    again = read(new)
    again.inherit(read(Cancel(("b",), NOW - DAY)), NOW)
    assert again.revives(message("b", **{REPLACES: "b", GENERATION: new.generation}), NOW)
    assert memory.judge(by_new, NOW) == Fate(POSTPONED, NOW + 9)


def test_what_was_kept_stays_kept_or_cancelled_when_all_is_read_again():
    old, new = (
        superseding("doc", number, NOW + number, NOW + number + 5, 5) for number in range(2)
    )
    cancelled = Cancel(("doc",), NOW + 2, keyed=True)
    for before, records, expected in (
        ([old, new], [old, new, cancelled], CANCELLED),
        ([old, new, cancelled], [old, new], CANCELLED),
        ([old], [old, new], None),
    ):
        memory = read(*records)
        memory.inherit(read(*before), NOW)
        assert reason(memory, keyed("doc", old.generation)) == expected


def test_what_was_valid_before_the_stream_was_deleted_is_superseded_by_what_is_in_it_now():
    old, new = superseding("doc", 1, NOW, NOW + 5), superseding("doc", 2, NOW + 1, NOW + 6)
    memory = read(new)
    memory.inherit(read(old), NOW)
    assert reason(memory, keyed("doc", old.generation)) == SUPERSEDED
    assert reason(memory, keyed("doc", new.generation)) is None


def test_a_cancelled_key_takes_along_what_ran_although_a_later_one_was_valid():
    old, new = (
        superseding("doc", number, NOW + number, NOW + number + 5, 5) for number in range(2)
    )
    memory = read(old, new)
    assert reason(memory, keyed("doc", old.generation)) is None
    memory.learn(Cancel(("doc",), NOW + 2, keyed=True), NOW)
    assert reason(memory, keyed("doc", old.generation)) == CANCELLED
    assert reason(memory, keyed("doc", new.generation)) == CANCELLED
    memory.learn(old, NOW)
    assert reason(memory, keyed("doc", old.generation)) == CANCELLED


def test_what_was_cancelled_by_its_key_does_not_run_after_the_longest_wait():
    old, new = (
        superseding("doc", number, NOW + number, NOW + number + 5, 5) for number in range(2)
    )
    memory = read(old, Cancel(("doc",), NOW, keyed=True), new)
    assert reason(memory, keyed("doc", old.generation)) == SUPERSEDED
    assert reason(memory, keyed("doc", new.generation)) is None
    # The longest wait counts from what was not cancelled.
    last = superseding("doc", 2, NOW + 2, NOW + 6, 5)
    memory.learn(last, NOW)
    assert reason(memory, keyed("doc", new.generation)) == SUPERSEDED


@pytest.mark.parametrize("ids_first", [True, False])
def test_a_key_is_cancelled_in_the_order_of_its_own_stream(ids_first):
    by_id, by_key = (
        Cancel(("a", "b", "id"), NOW + 1, keyed=by_its_key) for by_its_key in (False, True)
    )
    a, b, c = (superseding(name, number, NOW, NOW + 5) for number, name in enumerate("abc"))
    again = superseding("b", 3, NOW + 2, NOW + 6)
    ids: list[Record] = [by_id]
    keys: list[Record] = [a, b, c, by_key, again]
    memory = read(*(ids + keys if ids_first else keys + ids))
    assert reason(memory, keyed("a", a.generation)) == CANCELLED
    assert reason(memory, keyed("b", again.generation)) is None
    assert reason(memory, message("id")) == CANCELLED
    # What has a key's name for its id is cancelled with it, and not superseded.
    assert reason(memory, message("a")) == CANCELLED
    assert reason(memory, message("c")) is None


# -- any order ---------------------------------------------------------------------------------


class Story(RuleBasedStateMachine):
    """Publish, amend, arrive, arrive again and restart, in any order.

    The oracle knows the whole story; a memory knows the records that it has read.
    """

    @initialize()
    def begin(self) -> None:
        self.now = NOW
        self.log: list[Record] = []
        self.memory = Memory(31 * DAY)
        self.read = 0
        self.plain: set[str] = set()
        self.cancelled: set[str] = set()
        self.valid: dict[str, str] = {}
        self.generations: dict[str, list[str]] = {}
        self.dead_keys: set[str] = set()

    plain_names = st.sampled_from("abcdef")
    # Some of them are ids as well.
    keys = st.sampled_from("aby")

    @rule(name=plain_names)
    def publish(self, name: str) -> None:
        self.plain.add(name)

    @rule(key=keys, delay=st.integers(1, 5000))
    def publish_with_key(self, key: str, delay: int) -> None:
        # Of two in one millisecond that are forgotten, none is known to be the older.
        self.now += 1
        generation = new_generation(self.now)
        self.log.append(Supersede(key, generation, self.now + delay, self.now, keyed=True))
        self.generations.setdefault(key, []).append(generation)
        self.valid[key] = generation
        self.dead_keys.discard(key)

    @rule(name=plain_names)
    def cancel(self, name: str) -> None:
        self.log.append(Cancel((name,), self.now))
        self.cancelled.add(name)

    @rule(key=keys)
    def cancel_key(self, key: str) -> None:
        if key in self.valid:
            self.log.append(Cancel((key,), self.now, keyed=True))
            self.dead_keys.add(key)

    @rule(milliseconds=st.integers(0, 3 * names_module.ON_ITS_WAY))
    def time_passes(self, milliseconds: int) -> None:
        self.now += milliseconds

    @rule(count=st.integers(1, 5))
    def read_on(self, count: int) -> None:
        for record in self.log[self.read : self.read + count]:
            self.memory.learn(record, self.now)
        self.read = min(self.read + count, len(self.log))

    @rule()
    def restart(self) -> None:
        self.memory, self.read = Memory(31 * DAY), 0
        self.read_on(len(self.log) or 1)

    @invariant()
    def what_was_not_amended_passes(self) -> None:
        for name in self.plain - self.cancelled:
            assert self.memory.judge(message(name), self.now) is None

    @invariant()
    def what_is_known_to_be_amended_never_does(self) -> None:
        if self.read < len(self.log):
            return
        for name in self.cancelled:
            assert reason(self.memory, message(name), self.now) == CANCELLED
        for key, generations in self.generations.items():
            for generation in generations:
                expected = None if generation == self.valid[key] else SUPERSEDED
                if expected is None and key in self.dead_keys:
                    expected = CANCELLED
                assert reason(self.memory, keyed(key, generation), self.now) == expected

    @invariant()
    def the_latest_of_a_key_is_never_dropped_as_superseded(self) -> None:
        for key, generation in self.valid.items():
            assert reason(self.memory, keyed(key, generation), self.now) != SUPERSEDED


TestStory = Story.TestCase
TestStory.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


# -- two streams without a common order --------------------------------------------------------

FEW_TIMES = NOW - DAY, NOW, NOW + 5, NOW + 700_000, NOW + 60 * DAY
GENERATIONS = [f"{at:x}-g" for at in FEW_TIMES[1:4]]
few_times = st.sampled_from(FEW_TIMES)
few_names = st.sampled_from("ab")
few_waits = st.sampled_from([None, 5, 700_000])
supersedes = few_names, st.sampled_from(GENERATIONS), few_times, few_times
cancels = few_names.map(lambda few: (few,)), few_times
of_ids: st.SearchStrategy[Record] = st.one_of(
    st.builds(Supersede, *supersedes),
    st.builds(Cancel, *cancels, st.none() | few_times),
    st.builds(Postpone, few_names, few_times, few_times),
)
of_keys: st.SearchStrategy[Record] = st.one_of(
    st.builds(Supersede, *supersedes, few_waits, st.just(value=True)),
    st.builds(Cancel, *cancels, st.none(), st.just(value=True)),
)
NOT, ALL, WHAT_IS_LEFT = "not", "all", "what is left"
#: What is read of both streams, what of it is read again by another memory, which may follow a
#: deletion of the streams, and how much time passes.
chapters = st.lists(
    st.tuples(
        st.lists(of_ids, max_size=5),
        st.lists(of_keys, max_size=5),
        st.sampled_from([NOT, ALL, WHAT_IS_LEFT]),
        st.sampled_from([0, 61_000, 700_000, 2 * DAY, 40 * DAY]),
    ),
    min_size=1,
    max_size=3,
)
EVERY_MESSAGE = [
    message(name, **{header: value for header, value in zip(headers, values, strict=True) if value})
    for headers in [(KEY, REPLACES, GENERATION, NESTING)]
    for name, *values in product("ac", ["", *"ab"], ["", *"ab"], ["", *GENERATIONS[:2]], [0, 1])
]


Merge = Callable[[list[Record], list[Record], Random], list[Record]]


def ids_first(ids: list[Record], keys: list[Record], _: Random) -> list[Record]:
    return ids + keys


def keys_first(ids: list[Record], keys: list[Record], _: Random) -> list[Record]:
    return keys + ids


def mixed(ids: list[Record], keys: list[Record], random: Random) -> list[Record]:
    """Merge in any order that keeps the one of each."""
    order = [True] * len(ids) + [False] * len(keys)
    random.shuffle(order)
    streams = iter(keys), iter(ids)
    return [next(streams[is_of_ids]) for is_of_ids in order]


@given(chapters, st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_what_one_stream_says_does_not_depend_on_what_was_read_of_the_other(chapters, random):
    merges: list[Merge] = [ids_first, keys_first, mixed]
    memories = {merge: Memory(31 * DAY) for merge in merges}
    ids, keys, now = list[Record](), list[Record](), NOW
    for some_ids, some_keys, again, passes in chapters:
        ids += some_ids
        keys += some_keys
        read_ids, read_keys = (ids, keys) if again == ALL else (some_ids, some_keys)
        for merge, before in memories.items():
            memory = memories[merge] = before if again == NOT else Memory(31 * DAY)
            for record in merge(read_ids, read_keys, random):
                memory.learn(record, now)
            if again != NOT:
                memory.inherit(before, now)
        now += passes
        # With a record of either stream, what has expired is removed.
        memories[mixed].learn(Cancel(("another",), now), now)
        for message in EVERY_MESSAGE:
            expected, *others = (
                (
                    memory.judge(message, now),
                    memory.revives(message, now),
                    memory.awaits_record(message, now),
                )
                for memory in memories.values()
            )
            assert others == [expected, expected]


@pytest.mark.parametrize(
    ("headers", "begins"),
    [
        ({}, False),
        ({KEY: "k"}, True),
        ({REPLACES: "a"}, True),
        ({KEY: "k", "retries": 1}, True),
        ({KEY: "k", "task": "t", "retries": 0}, True),
        ({KEY: "k", "task": "t", "retries": 1}, False),
        ({REPLACES: "a", "task": "t", "retries": 1}, True),
        ({KEY: "k", REPLACES: "a", GENERATION: "1-a"}, False),
    ],
    ids=repr,
)
def test_a_retry_supersedes_nothing_by_its_key(headers, begins):
    assert Generations.supersedes(headers) == begins


@pytest.mark.parametrize(
    ("headers", "retried"),
    [
        ({"a": 1}, {"a": 1}),
        ({"a": 1, "x-delay": 3_600_000}, {"a": 1}),
        ({"a": 1, KEY: "k", REPLACES: "old", GENERATION: "forged"}, {"a": 1}),
    ],
    ids=repr,
)
@pytest.mark.parametrize(
    "own",
    [
        {},
        {KEY: "k", LONGEST_WAIT: 5, GENERATION: "1-a"},
        {REPLACES: "old", GENERATION: "1-a", "x-delay-jitter": 5},
    ],
    ids=repr,
)
def test_a_retry_by_nested_headers_keeps_those_of_its_task(headers, retried, own):
    given = {"task": "t", "id": "i", **own, "headers": headers}
    assert with_own_nested(given) == {**given, "headers": {**retried, **own}}


@pytest.mark.parametrize(
    "headers",
    [
        {"task": "t", "retries": 0, KEY: "k"},
        {"task": "t", "retries": 1, "id": "of none that runs", "mine": 1},
        {"task": "t", "retries": 1, KEY: "k", GENERATION: "1-a"},
        {"task": "celery.chord_unlock", "retries": 2, "mine": 1},
    ],
    ids=repr,
)
def test_what_celery_makes_of_nothing_else_is_resent_as_it_is(headers):
    assert as_resent(headers) is headers


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({}, {KEY: "k", GENERATION: "1-a"}),
        ({"mine": 1, KEY: "other"}, {KEY: "k", GENERATION: "1-a"}),
        # It begins anew what the task was.
        ({REPLACES: "i"}, {}),
    ],
    ids=repr,
)
def test_a_retry_with_headers_of_its_own_is_the_same_message(monkeypatch, given, added):
    request = SimpleNamespace(id="i", headers={KEY: "k", GENERATION: "1-a", "theirs": 1})
    running = SimpleNamespace(get_current_worker_task=lambda: SimpleNamespace(request=request))
    monkeypatch.setitem(sys.modules, "celery._state", running)
    headers = {"task": "t", "id": "i", "retries": 1, **given}
    assert as_resent(headers) == {**headers, **added}


@pytest.mark.parametrize(
    "headers",
    [{"headers": {"x-delay": 5}, KEY: "k"}, {"task": "t", "headers": "text", KEY: "k"}],
    ids=repr,
)
def test_what_no_retry_resends_stays_as_it_was_published(headers):
    assert with_own_nested(headers) == headers
