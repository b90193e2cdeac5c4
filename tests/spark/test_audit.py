from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest

from kombu_binary_delay.spark import schema as s
from kombu_binary_delay.spark.audit import Thresholds, audit, lateness, span, summarize

Event = tuple[object, ...]
NOON = datetime(2020, 1, 1, 12, tzinfo=UTC)
END = 10_000  # seconds after noon: the journal's last event


def at(seconds):
    return NOON + timedelta(seconds=seconds)


def receipt(
    task_id,
    due=100.0,
    status=s.PUBLISHED,
    key=None,
    queue="mail",
    hops=3,
    sent=0.0,
    action=s.PUBLISH,
):
    key = key or f"key of {task_id}"
    return ("job", key, task_id, "send", queue, at(due), at(sent), hops, 0, 0, status, None, action)


def amendment(task_id, sent, action=s.CANCEL, status=s.RECORDED, due=100.0):
    return receipt(task_id, due, status, None, None, None, sent, action)


def event(
    kind, task_id, seconds, due=100.0, retries=0, task="send", queue="mail", state=None, hops=3
):
    when = (at(seconds), at(due))
    return (kind, task_id, retries, task, queue, *when, "125ms-2x31", hops, state, None)


def scheduled(task_id, seconds=0.0, **more):
    return event(s.SCHEDULED, task_id, seconds, **more)


def released(task_id, seconds, **more):
    return event(s.RELEASED, task_id, seconds, **more)


def executed(task_id, seconds, **more):
    return event(s.EXECUTED, task_id, seconds, state="SUCCESS", **more)


def arrives(task_id, seconds, **more):
    return [released(task_id, seconds, **more), executed(task_id, seconds + 0.01, **more)]


#: The last thing that anybody wrote, of a task that is none of ours here.
LAST = [released("last", END, due=END, task=None)]


@pytest.fixture
def judge(spark):
    def judge(receipts, events, **options):
        return audit(
            spark.createDataFrame(receipts, s.RECEIPTS) if receipts is not None else None,
            spark.createDataFrame([*events, *LAST], s.JOURNAL),
            **options,
        ).where("not task_id <=> 'last'")

    return judge


def test_a_journal_is_complete_until_its_last_export(spark):
    def journal(exports):
        marks = [(s.COMPLETE, *[None] * 4, at(export), *[None] * 5) for export in exports]
        return spark.createDataFrame([scheduled("gone"), *marks], s.JOURNAL)

    # The last has a clock that is wrong.
    for exports, last in (([], None), ([50, 400], 400), ([50, 30_000_000_000], 50)):
        assert span(journal(exports)) == (None, last and at(last))
    [row] = audit(None, journal([401, 50])).collect()
    assert (row.task_id, row.verdict) == ("gone", s.LOST_IN_THE_LADDER)


def test_who_knows_when_a_journal_begins_and_ends_says_so(spark):
    sent = spark.createDataFrame([receipt("gone")], s.RECEIPTS)
    journal = spark.createDataFrame([], s.JOURNAL)
    [row] = audit(sent, journal, since=at(-1), until=at(END)).collect()
    assert row.verdict == s.LOST_IN_THE_LADDER
    [row] = audit(sent, journal, since=at(101), until=at(END)).collect()
    assert row.verdict == s.UNDECIDED


def test_a_journal_begins_no_sooner_for_a_task_that_began_before_it(spark):
    sent = spark.createDataFrame([receipt("gone")], s.RECEIPTS)
    events = [executed("ran long", 50, due=50), *arrives("first", 150, due=150), *LAST]
    journal = spark.createDataFrame(events, s.JOURNAL)
    assert span(journal) == (at(150), at(END))
    [row] = audit(sent, journal).where("task_id = 'gone'").collect()
    assert row.verdict == s.UNDECIDED


@dataclass(frozen=True)
class Fate:
    """What is told of a task "x", and what an audit is to find: of each try, by these columns."""

    receipts: list[Event]
    events: list[Event]
    verdicts: dict[int, dict[str, object]]


def fate(events, verdict=None, *, receipts=None, tries=None, **columns):
    """Return the fate of a task that was published once, due at 100, unless it is said otherwise.

    :param tries: the verdict of each try, where there are more than the first.
    """
    tries = {0: verdict} if tries is None else tries
    verdicts = {retries: {"verdict": name, **columns} for retries, name in tries.items()}
    return Fate([receipt("x")] if receipts is None else receipts, events, verdicts)


def revoked(task_id, seconds, **more):
    return [
        released(task_id, seconds, **more),
        event(s.EXECUTED, task_id, seconds, state="REVOKED", **more),
    ]


def replaced(task_id, due, sent=10.0):
    """A message that took the place of one that was due at 100, which was dropped then."""
    return [scheduled(task_id), scheduled(task_id, sent, due=due), event(s.CANCELLED, task_id, 100)]


def postponed(task_id, until):
    """A message that was due at 100, and was then delayed until another time."""
    events = [scheduled(task_id), event(s.POSTPONED, task_id, 100)]
    return events if until is None else [*events, scheduled(task_id, 100, due=until)]


AMENDED: dict[str, tuple[list[Event], str]] = {
    "cancelled": ([scheduled("x"), event(s.CANCELLED, "x", 101)], s.TAKEN_BACK),
    "cancelled as its worker died": (
        [scheduled("x"), released("x", 101), event(s.CANCELLED, "x", 102)],
        s.TAKEN_BACK,
    ),
    "cancelled, and published without the journal": ([event(s.CANCELLED, "x", 101)], s.TAKEN_BACK),
    "discarded by its worker": ([scheduled("x"), *revoked("x", 100.1)], s.TAKEN_BACK),
    "late, and expired by then": ([scheduled("x"), *revoked("x", 200)], s.LATE),
    "discarded by its worker, and a later copy ran in time": (
        [scheduled("x"), *revoked("x", 100.1), scheduled("x", 101), *arrives("x", 103)],
        s.OK,
    ),
    "discarded by its worker, and a later copy ran too late": (
        [scheduled("x"), *revoked("x", 100.1), scheduled("x", 121), *arrives("x", 124)],
        s.LATE,
    ),
    "ran in time, and a later copy was discarded": (
        [scheduled("x"), *arrives("x", 101), scheduled("x", 121), *revoked("x", 124)],
        s.OK,
    ),
    "published twice, and cancelled": (
        [*replaced("x", 200), event(s.CANCELLED, "x", 200, due=200)],
        s.TAKEN_BACK,
    ),
    "cancelled before it was due, by nobody": (
        [scheduled("x"), *arrives("x", 101), event(s.CANCELLED, "x", 102)],
        s.OK,
    ),
    "postponed": ([*postponed("x", until=200), *arrives("x", 201, due=200)], s.PUT_OFF),
    "postponed twice": (
        [
            *postponed("x", until=200),
            *(event(s.POSTPONED, "x", 200, due=200), scheduled("x", 200, due=300)),
            *arrives("x", 301, due=300),
        ],
        s.PUT_OFF,
    ),
    "postponed, and waits": (postponed("x", until=2 * END), s.STILL_WAITING),
    "postponed, and lost": (postponed("x", until=200), s.LOST_IN_THE_LADDER),
    "postponed until nobody knows when": (postponed("x", until=None), s.UNDECIDED),
    "postponed, and late": ([*postponed("x", until=200), *arrives("x", 206, due=200)], s.LATE),
    "postponed, and early": ([*postponed("x", until=200), *arrives("x", 199, due=200)], s.EARLY),
    "postponed after its worker died": (
        [
            *(scheduled("x"), released("x", 101), event(s.POSTPONED, "x", 102)),
            *(scheduled("x", 102, due=200), *arrives("x", 201, due=200)),
        ],
        s.PUT_OFF,
    ),
    "postponed after its worker died, and late": (
        [
            *(scheduled("x"), released("x", 101), event(s.POSTPONED, "x", 102)),
            *(scheduled("x", 102, due=200), *arrives("x", 206, due=200)),
        ],
        s.LATE,
    ),
    "postponed after its worker died, and delivered twice then": (
        [
            *(scheduled("x"), released("x", 101), event(s.POSTPONED, "x", 102)),
            *(scheduled("x", 102, due=200), released("x", END - 10, due=200)),
            released("x", 201, due=200),
        ],
        s.STILL_WAITING,
    ),
    "postponed after its worker died, and waits": (
        [
            *(scheduled("x"), released("x", 101), event(s.POSTPONED, "x", 102)),
            scheduled("x", 102, due=2 * END),
        ],
        s.STILL_WAITING,
    ),
    "postponed after its worker died, and lost": (
        [
            *(scheduled("x"), released("x", 101), event(s.POSTPONED, "x", 102)),
            scheduled("x", 102, due=200),
        ],
        s.LOST_IN_THE_LADDER,
    ),
    "postponed, and replaced by a sooner one": (
        [*postponed("x", 5000), scheduled("x", 110, due=200), *arrives("x", 201, due=200)],
        s.PUT_OFF,
    ),
    "postponed, and replaced by one that is lost": (
        [*postponed("x", 2 * END), scheduled("x", 110, due=200)],
        s.LOST_IN_THE_LADDER,
    ),
    "postponed by a clock that is behind": (
        [
            *(scheduled("x"), event(s.POSTPONED, "x", -5), scheduled("x", -5, due=200)),
            *arrives("x", 201, due=200),
        ],
        s.PUT_OFF,
    ),
    "replaced by a later one": ([*replaced("x", 200), *arrives("x", 201, due=200)], s.REPLACED),
    "replaced by a sooner one": ([*replaced("x", 50), *arrives("x", 51, due=50)], s.REPLACED),
    "replaced by a sooner one, and not due": (
        [*replaced("x", 50)[:2], *arrives("x", 51, due=50)],
        s.OK,
    ),
    "replaced, and waits": (replaced("x", 2 * END), s.STILL_WAITING),
    "replaced, and lost": (replaced("x", 200), s.LOST_IN_THE_LADDER),
    "replaced, and dropped by the worker": (
        [*replaced("x", 200), released("x", 201, due=200)],
        s.LOST_AFTER_RELEASE,
    ),
    "replaced, and late": ([*replaced("x", 200), *arrives("x", 206, due=200)], s.LATE),
    "replaced and dropped twice, and waits": (
        [*replaced("x", 2 * END), event(s.CANCELLED, "x", 101)],
        s.STILL_WAITING,
    ),
    "replaced and dropped twice, and lost": (
        [*replaced("x", 200), event(s.CANCELLED, "x", 101)],
        s.LOST_IN_THE_LADDER,
    ),
    "replaced twice, the first dropped twice, and lost": (
        [
            *(*replaced("x", 300), event(s.CANCELLED, "x", 101)),
            *(scheduled("x", 20, due=200), event(s.CANCELLED, "x", 300, due=300)),
        ],
        s.LOST_IN_THE_LADDER,
    ),
    "replaced twice, and cancelled": (
        [
            *replaced("x", 300),
            scheduled("x", 20, due=200),
            event(s.CANCELLED, "x", 200, due=200),
            event(s.CANCELLED, "x", 300, due=300),
        ],
        s.TAKEN_BACK,
    ),
}

#: What a clock says that is wrong: of one task, the events, its verdict, and how many of its times
#: are reported to be wrong.
YEAR_2999 = 31_000_000_000
HOUR = 3600
WRONG: dict[str, tuple[list[Event], str, int]] = {
    "scheduled in 2999": ([scheduled("x", YEAR_2999), *arrives("x", 101)], s.OK, 1),
    "released in 2999": ([released("x", YEAR_2999), executed("x", 101)], s.OK, 1),
    "executed in 2999": ([released("x", 101), executed("x", YEAR_2999)], s.OK, 1),
    "released in 1988": ([released("x", -1_000_000_000), executed("x", 101)], s.OK, 1),
    "executed in 1988": ([released("x", 101), executed("x", -1_000_000_000)], s.OK, 1),
    "early, and released in 1988": (
        [released("x", -1_000_000_000), executed("x", 99)],
        s.EARLY,
        1,
    ),
    "released again, first in 1988": (
        [released("x", -1_000_000_000), *arrives("x", 101)],
        s.OK,
        1,
    ),
    "arrived in 2999": (arrives("x", YEAR_2999), s.UNDECIDED, 2),
    "executed twice, once in 2999": (
        [*arrives("x", 101), executed("x", YEAR_2999)],
        s.DUPLICATE,
        1,
    ),
    "arrived in 1988": (arrives("x", -1_000_000_000), s.UNDECIDED, 2),
    "scheduled in 1988": ([scheduled("x", -1_000_000_000), *arrives("x", 101)], s.OK, 0),
    # It may be true; but it is the word of one clock.
    "scheduled an hour ahead": (
        [scheduled("x", END + HOUR, due=END + 2 * HOUR)],
        s.STILL_WAITING,
        0,
    ),
    "arrived an hour ahead": (arrives("x", END + HOUR), s.LATE, 0),
}

#: What a consumer without Celery has postponed.
PLAIN = [
    *(scheduled("x", task=None), released("x", 101, task=None)),
    *(event(s.POSTPONED, "x", 102, task=None), scheduled("x", 102, due=200, task=None)),
]


def promise_of(events):
    """Return a receipt with the due time of an event."""
    return (*receipt("x")[:5], events[0][6], *receipt("x")[6:])


SOON = END - 1
RESCHEDULED = [amendment("x", 10, s.RESCHEDULE, due=900)]
AGAIN = receipt("x", due=7260, sent=7200)
NACKED = receipt("x", due=60, status=s.NACKED)
FIRST, SECOND = receipt("x", due=60), receipt("x", due=120)
COPIES = [*arrives("x", 61, due=60), *arrives("x", 121, due=120)]

#: Of all tasks of one audit.
FATES = {
    "fine": fate(arrives("x", 100.2), s.OK),
    "to the microsecond": fate(
        arrives("x", 100.000001, due=100.000001), s.OK, receipts=[receipt("x", due=100.000001)]
    ),
    "early": fate(arrives("x", 99.999), s.EARLY),
    "late": fate(arrives("x", 105.1), s.LATE),
    "twice": fate([*arrives("x", 101), *arrives("x", 102)], s.DUPLICATE),
    "gone": fate([scheduled("x")], s.LOST_IN_THE_LADDER),
    "dropped": fate([released("x", 101)], s.LOST_AFTER_RELEASE),
    "far": fate([scheduled("x", due=9e9)], s.STILL_WAITING, receipts=[receipt("x", due=9e9)]),
    "on its way": fate([], s.STILL_WAITING, receipts=[receipt("x", due=SOON)]),
    "in the worker": fate(
        [released("x", SOON, due=SOON)], s.STILL_WAITING, receipts=[receipt("x", due=SOON)]
    ),
    "redelivered": fate([released("x", 101), *arrives("x", 102)], s.OK),
    "delivered again, and has its patience again": fate(
        [scheduled("x"), released("x", 101), released("x", END - 10)],
        s.STILL_WAITING,
        lateness=1.0,
    ),
    "nacked": fate([scheduled("x")], s.NOT_PUBLISHED, receipts=[receipt("x", status=s.NACKED)]),
    "nacked, yet it came": fate(arrives("x", 101), s.OK, receipts=[receipt("x", status=s.NACKED)]),
    "before the journal": fate([], s.UNDECIDED, receipts=[receipt("x", due=-100, sent=-200)]),
    "due when sent": fate(
        [scheduled("x", due=-1, hops=0), *arrives("x", 0.1, due=-1)],
        s.OK,
        receipts=[receipt("x", due=-1, hops=0)],
    ),
    # Its receipt counted on a hop, but the time had passed when the window was sent.
    "due when sent, dropped": fate(
        [scheduled("x", 2.0, due=1, hops=0)],
        s.LOST_AFTER_RELEASE,
        receipts=[receipt("x", due=1, hops=1)],
    ),
    "due when sent, untold": fate(
        [], s.LOST_AFTER_RELEASE, receipts=[receipt("x", due=-1, hops=0)]
    ),
    "long due, just sent": fate(
        [scheduled("x", SOON, due=1, hops=0)],
        s.STILL_WAITING,
        receipts=[receipt("x", due=1, hops=0, sent=SOON)],
    ),
    "nacked, and just sent again": fate(
        [scheduled("x", SOON, due=1, hops=0)],
        s.NOT_PUBLISHED,
        receipts=[receipt("x", due=1, status=s.NACKED)],
    ),
    # What was taken back or changed while it waited.
    **{
        name: fate(events, verdict, postponed=name.startswith("postponed"))
        for name, (events, verdict) in AMENDED.items()
    },
    # A receipt of an amendment is no message, and says what ran after it.
    "revoked": fate(revoked("x", 101), s.TAKEN_BACK, receipts=[receipt("x"), amendment("x", 10)]),
    "ran": fate(arrives("x", 101), s.RAN_AFTER_CANCEL, receipts=[receipt("x"), amendment("x", 10)]),
    "revoked, and late": fate(
        revoked("x", 150), s.TAKEN_BACK, receipts=[receipt("x"), amendment("x", 10)]
    ),
    "expired, and late": fate(revoked("x", 150), s.LATE, receipts=[receipt("x")]),
    "came before it was cancelled": fate(
        arrives("x", 101), s.OK, receipts=[receipt("x"), amendment("x", 102)]
    ),
    "cancelled with a due time": fate(
        [scheduled("x")],
        s.LOST_IN_THE_LADDER,
        receipts=[receipt("x"), amendment("x", 10, due=9e9)],
    ),
    "not cancelled": fate(
        arrives("x", 101), s.OK, receipts=[receipt("x"), amendment("x", 10, status=s.REFUSED)]
    ),
    "rescheduled": fate(
        [*postponed("x", until=200), *arrives("x", 201, due=200)],
        s.PUT_OFF,
        receipts=[receipt("x"), amendment("x", 10, s.RESCHEDULE, due=200)],
    ),
    "replaced": fate(
        [*replaced("x", 200), *arrives("x", 201, due=200)],
        s.REPLACED,
        receipts=[receipt("x"), amendment("x", 10)],
    ),
    "never published, and cancelled": fate([], receipts=[amendment("x", 10)], tries={}),
    "cancelled between its tries": fate(
        [
            *(*arrives("x", 101), scheduled("x", 150, retries=1, due=200)),
            *arrives("x", 201, retries=1, due=200),
        ],
        receipts=[receipt("x"), amendment("x", 150)],
        tries={0: s.OK, 1: s.RAN_AFTER_CANCEL},
    ),
    # A reschedule that was recorded moves the due time. First, a worker that reads no amendments.
    "reschedule ignored": fate(
        arrives("x", 100.5), s.RESCHEDULE_IGNORED, receipts=[receipt("x"), *RESCHEDULED]
    ),
    "rescheduled, then cancelled, and ran": fate(
        arrives("x", 100.5),
        s.RAN_AFTER_CANCEL,
        receipts=[receipt("x"), *RESCHEDULED, amendment("x", 20)],
    ),
    "rescheduled, then cancelled, and dropped": fate(
        revoked("x", 100.5),
        s.TAKEN_BACK,
        receipts=[receipt("x"), *RESCHEDULED, amendment("x", 20)],
        lateness=0.5,
    ),
    # As if the journal had lost the event "postponed".
    "rescheduled, and in time": fate(
        arrives("x", 901), s.OK, receipts=[receipt("x"), *RESCHEDULED], lateness=1.0
    ),
    "rescheduled, and late": fate(arrives("x", 950), s.LATE, receipts=[receipt("x"), *RESCHEDULED]),
    "came before it was rescheduled": fate(
        arrives("x", 101),
        s.OK,
        receipts=[receipt("x"), amendment("x", 102, s.RESCHEDULE, due=900)],
    ),
    "not rescheduled": fate(
        arrives("x", 101),
        s.OK,
        receipts=[receipt("x"), amendment("x", 10, s.RESCHEDULE, s.REFUSED, due=900)],
    ),
    "rescheduled twice": fate(
        arrives("x", 501),
        s.OK,
        receipts=[receipt("x"), *RESCHEDULED, amendment("x", 20, s.RESCHEDULE, due=500)],
        lateness=1.0,
    ),
    "rescheduled, and waits": fate(
        [scheduled("x")],
        s.STILL_WAITING,
        receipts=[receipt("x"), amendment("x", 10, s.RESCHEDULE, due=END + 100)],
    ),
    # A due time that the broker refused does not count.
    "refused, then postponed": fate(
        [*postponed("x", 200), *arrives("x", 201, due=200)],
        s.PUT_OFF,
        receipts=[receipt("x", due=END, status=s.RETURNED), receipt("x", sent=10)],
        lateness=1.0,
    ),
    "refused, then postponed, nobody knows until when": fate(
        postponed("x", None),
        s.UNDECIDED,
        receipts=[receipt("x", due=END, status=s.RETURNED), receipt("x", sent=10)],
    ),
    # What counts is the first promise that the broker took, and each copy's own.
    "nacked, and taken two hours later": fate(
        [scheduled("x", due=60), scheduled("x", 7200, due=7260), *arrives("x", 7261, due=7260)],
        s.OK,
        receipts=[NACKED, AGAIN],
        due=7260,
        lateness=1.0,
    ),
    "unknown, yet it came": fate(
        [*arrives("x", 61, due=60), *arrives("x", 7261, due=7260)],
        s.DUPLICATE,
        receipts=[receipt("x", due=60, status="unknown"), AGAIN],
        due=60,
        lateness=1.0,
    ),
    "never taken": fate(
        [scheduled("x", due=60)],
        s.NOT_PUBLISHED,
        receipts=[NACKED, receipt("x", due=90, status=s.NACKED)],
        due=60,
        lateness=None,
    ),
    "taken, and then refused with a sooner due time": fate(
        [scheduled("x", due=2 * END)],
        s.STILL_WAITING,
        receipts=[receipt("x", due=2 * END), receipt("x", due=60, sent=1, status=s.REFUSED)],
        due=2 * END,
        lateness=None,
    ),
    "sent twice": fate(COPIES, s.DUPLICATE, receipts=[FIRST, SECOND], due=60, lateness=1.0),
    "sent twice, and the first came not": fate(
        COPIES[2:], s.LATE, receipts=[FIRST, SECOND], due=60, lateness=61.0
    ),
    "without receipts": fate(
        [scheduled("x", due=60), scheduled("x", due=120), *COPIES[2:]],
        s.OK,
        receipts=[],
        due=120,
        lateness=1.0,
    ),
    "a copy before its own time": fate(
        [*arrives("x", 61, due=60), *arrives("x", 118, due=120)],
        s.EARLY,
        receipts=[FIRST, SECOND],
        due=60,
        lateness=-2.0,
    ),
    "a retry, which is no duplicate": fate(
        [
            *(*arrives("x", 101), scheduled("x", retries=1, due=200.0)),
            *arrives("x", 200.5, retries=1, due=200.0),
        ],
        tries={0: s.OK, 1: s.OK},
    ),
    # Without Celery, a consumer has its message when it is released.
    "plain": fate([released("x", 101, task=None)], s.OK, receipts=[], lateness=1.0),
    "plain, postponed and lost": fate(PLAIN, s.LOST_IN_THE_LADDER, receipts=[], lateness=None),
    "plain and postponed": fate(
        [*PLAIN, released("x", 201, due=200, task=None)],
        s.PUT_OFF,
        receipts=[],
        lateness=1.0,
        released=2,
    ),
    # Events with a wrong clock change no other verdict, and are reported.
    **{
        name: fate(events, verdict, receipts=[promise_of(events)], misdated=misdated)
        for name, (events, verdict, misdated) in WRONG.items()
    },
    "sent in 2999": fate(
        arrives("x", 101), s.OK, receipts=[receipt("x", sent=YEAR_2999)], misdated=1
    ),
}


@pytest.mark.parametrize("times", [1, 2], ids=["once", "each event written twice"])
def test_every_planted_fate_gets_its_verdict_whatever_became_of_others(judge, times):
    # Rows that have no id are no message.
    refused = receipt("x", status=s.REFUSED)
    receipts = [(*refused[:2], None, *refused[3:5], None, *refused[6:])] * 2
    events = []
    for name, told in FATES.items():
        receipts += [(*row[:2], name, *row[3:]) for row in told.receipts]
        events += [(row[0], name, *row[2:]) for row in told.events * times]
    verdicts = judge(receipts, events).cache()
    rows = {}
    for row in verdicts.collect():
        due = row.due and (row.due - at(0).replace(tzinfo=None)).total_seconds()
        columns = {**row.asDict(), "due": due, "postponed": row.postponed > 0}
        rows[row.task_id, row.retries] = columns
    # Of each event that is written twice, these count two.
    counts = {"misdated", "released"} if times == 2 else set()
    expected = {
        (name, retries): {key: value for key, value in columns.items() if key not in counts}
        for name, told in FATES.items()
        for retries, columns in told.verdicts.items()
    }
    judged = {key: {name: rows[key][name] for name in expected.get(key, {})} for key in rows}
    assert judged == expected
    summary = summarize(verdicts)
    assert summary["postponed"] == sum(row["postponed"] for row in rows.values())
    assert summary["misdated"] == sum(row["misdated"] > 0 for row in rows.values())


def test_an_amendment_that_came_to_nothing_fails_the_audit(judge):
    receipts = [receipt("a"), amendment("a", 10)]
    receipts += [receipt("b"), amendment("b", 10, s.RESCHEDULE, due=900)]
    verdicts = judge(receipts, [*arrives("a", 101), *arrives("b", 101)]).cache()
    summary = summarize(verdicts)
    for name in ("ran_after_cancel", "reschedule_ignored"):
        assert summary["thresholds"][name] == {"measured": 1, "allowed": 0, "passed": False}
    assert summary["outcome"] == "failed"
    assert not summarize(verdicts, Thresholds(ran_after_cancel=1))["passed"]
    assert summarize(verdicts, Thresholds(ran_after_cancel=1, reschedule_ignored=1))["passed"]


def test_what_still_waits_is_not_judged_yet(judge):
    waiting = [receipt("a", due=END + 10)]
    summary = summarize(judge(waiting, [scheduled("a", due=END + 10)]))
    assert summary["verdicts"][s.STILL_WAITING] == 1
    assert (summary["passed"], summary["outcome"]) == (False, "not judged yet")
    both = [*arrives("b", 101), scheduled("a", due=END + 10)]
    assert summarize(judge([*waiting, receipt("b")], both))["outcome"] == "passed"


def test_what_is_delivered_again_is_lost_when_its_patience_is_over(judge):
    released_twice = [released("a", 101), released("a", END - 10)]
    [row] = judge([receipt("a")], [scheduled("a"), *released_twice], patience=5).collect()
    assert row.verdict == s.LOST_AFTER_RELEASE


def test_receipts_of_before_there_were_amendments_are_judged(spark):
    receipts = spark.createDataFrame([receipt("a")], s.RECEIPTS).drop("action")
    journal = spark.createDataFrame([*arrives("a", 101), *LAST], s.JOURNAL)
    [row] = audit(receipts, journal).where("task_id = 'a'").collect()
    assert row.verdict == s.OK


@pytest.mark.usefixtures("local_times")
def test_a_row_says_all_that_is_known_of_a_task(judge, spark):
    events = [scheduled("a"), released("a", 101), executed("a", 101.5)]
    expected = ("a", 0, "key of a", "send", "mail", at(100), at(0), 3, at(101), 1.0, 1, 1)
    row = spark.createDataFrame([(*expected, "SUCCESS", 0, 0, s.OK)], s.VERDICTS)
    assert judge([receipt("a")], events).collect() == row.collect()


def test_a_journal_that_ends_too_soon_proves_no_loss(judge):
    options = {"patience": END}
    [row] = judge([receipt("quiet")], [scheduled("quiet")], **options).collect()
    assert row.verdict == s.STILL_WAITING
    [row] = judge([receipt("quiet")], [scheduled("quiet")], until=at(3 * END), **options).collect()
    assert row.verdict == s.LOST_IN_THE_LADDER


def test_without_a_journal_nothing_is_said_of_anything(spark):
    receipts = spark.createDataFrame([receipt("a")], s.RECEIPTS)
    [row] = audit(receipts, spark.createDataFrame([], s.JOURNAL)).collect()
    assert row.verdict == s.UNDECIDED


def test_losses_among_many_are_found_exactly(judge):
    names = [f"task-{number}" for number in range(2000)]
    lost, early, twice = set(names[7::500]), set(names[11::400]), set(names[13::300])
    events = []
    for name in names:
        events.append(scheduled(name))
        if name not in lost:
            events += arrives(name, 99 if name in early else 100.5)
        if name in twice:
            events += arrives(name, 103)
    verdicts = judge([receipt(name) for name in names], events)
    by_verdict: dict[str, set[str]] = {}
    for row in verdicts.collect():
        by_verdict.setdefault(row.verdict, set()).add(row.task_id)
    assert by_verdict == {
        s.LOST_IN_THE_LADDER: lost,
        s.EARLY: early,
        s.DUPLICATE: twice,
        s.OK: set(names) - lost - early - twice,
    }


def test_lateness_is_told_by_hour_in_utc_queue_task_and_hops(judge, spark):
    receipts = [receipt(f"{n}", hops=n % 2, due=100 + 3600 * (n % 2)) for n in range(1000)]
    events = [
        row
        for n in range(1000)
        for row in arrives(f"{n}", 100 + 3600 * (n % 2) + n / 1000, due=100 + 3600 * (n % 2))
    ]
    events = [(*row[:8], None, *row[9:]) for row in events]
    verdicts = judge(receipts, events).cache()
    groups = {(row.grouping, row.value): row for row in lateness(verdicts).collect()}
    everyone = groups["all", "all"]
    assert everyone.tasks == 1000
    shares = (everyone.p50, everyone.p90, everyone.p99, everyone.p999, everyone.worst)
    assert shares == pytest.approx((0.499, 0.899, 0.989, 0.998, 0.999))
    sizes = {group: row.tasks for group, row in groups.items()}
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Asia/Kolkata")
    try:
        elsewhere = lateness(verdicts).collect()
        assert {(row.grouping, row.value): row.tasks for row in elsewhere} == sizes
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)
    assert sizes == {
        ("all", "all"): 1000,
        ("hour", "2020-01-01 12:00"): 500,
        ("hour", "2020-01-01 13:00"): 500,
        ("queue", "mail"): 1000,
        ("task", "send"): 1000,
        ("hops", "0"): 500,
        ("hops", "1"): 500,
    }


def test_thresholds_decide_what_passes(judge):
    events = [*arrives("a", 100.5), *arrives("b", 110), *arrives("b", 111), scheduled("c")]
    verdicts = judge([receipt("a"), receipt("b"), receipt("c")], events).cache()
    summary = summarize(verdicts, Thresholds(lost=0, duplicates=1, p99=5))
    assert summary["tasks"] == 3
    assert {name: count for name, count in summary["verdicts"].items() if count} == {
        s.OK: 1,
        s.DUPLICATE: 1,
        s.LOST_IN_THE_LADDER: 1,
    }
    assert summary["thresholds"] == {
        "early": {"measured": 0, "allowed": 0, "passed": True},
        "lost": {"measured": 1, "allowed": 0, "passed": False},
        "duplicates": {"measured": 1, "allowed": 1, "passed": True},
        "p99": {"measured": 10, "allowed": 5, "passed": False},
        "ran_after_cancel": {"measured": 0, "allowed": 0, "passed": True},
        "reschedule_ignored": {"measured": 0, "allowed": 0, "passed": True},
        "judged": {"measured": 3, "allowed": 1, "passed": True},
    }
    assert not summary["passed"]
    assert summarize(verdicts, Thresholds(lost=1))["passed"]


def test_an_audit_of_nothing_has_numbers_all_the_same(spark):
    summary = summarize(spark.createDataFrame([], s.VERDICTS))
    assert (summary["tasks"], summary["passed"], summary["lateness"]["p99"]) == (0, False, None)


def test_nothing_judged_is_a_failure_unless_it_was_asked_for(spark, judge):
    unknown = judge([receipt("a")], []).cache()
    assert [row.verdict for row in unknown.collect()] == [s.UNDECIDED]
    for verdicts in (spark.createDataFrame([], s.VERDICTS), unknown):
        summary = summarize(verdicts)
        assert summary["thresholds"]["judged"] == {"measured": 0, "allowed": 1, "passed": False}
        assert not summary["passed"]
        assert summarize(verdicts, Thresholds(judged=0))["passed"]


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
def test_a_threshold_that_no_number_can_meet_or_miss_is_refused(value):
    with pytest.raises(ValueError, match=f"p99 must be a finite number >= 0, got {value}; leave"):
        Thresholds(p99=value)


@pytest.mark.parametrize("option", ["late_after", "patience"])
def test_a_negative_time_is_refused(judge, option):
    with pytest.raises(ValueError, match=f"{option} must be a number of seconds >= 0, .* got -1"):
        judge(None, [], **{option: -1})
    with pytest.raises(ValueError, match=f"{option} must be .* got inf"):
        judge(None, [], **{option: float("inf")})


def test_the_verdicts_have_the_schema_they_say(judge, spark):
    schema = judge([receipt("a")], arrives("a", 101)).schema
    assert schema.simpleString() == spark.createDataFrame([], s.VERDICTS).schema.simpleString()
