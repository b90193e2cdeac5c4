from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from pyspark.testing import assertDataFrameEqual

from kombu_binary_delay.spark import schema as s
from kombu_binary_delay.spark.audit import Thresholds, audit, lateness, span, summarize

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


@pytest.mark.parametrize(
    ("exports", "verdict"),
    [
        ([], s.STILL_WAITING),
        ([50, 400], s.STILL_WAITING),
        ([401, 50], s.LOST_IN_THE_LADDER),
        # A clock that is wrong.
        ([50, 30_000_000_000], s.STILL_WAITING),
    ],
)
def test_a_journal_is_complete_until_its_last_export(spark, exports, verdict):
    marks = [(s.COMPLETE, *[None] * 4, at(export), *[None] * 5) for export in exports]
    journal = spark.createDataFrame([scheduled("gone"), *marks], s.JOURNAL)
    [row] = audit(None, journal).collect()
    assert (row.task_id, row.verdict) == ("gone", verdict)
    told = [export for export in exports if export < END]
    assert span(journal) == (None, at(max(told)) if told else None)


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


def test_every_planted_fate_gets_its_verdict(judge):
    soon = END - 1
    planted = {
        "fine": (receipt("fine"), arrives("fine", 100.2), s.OK),
        "to the microsecond": (
            receipt("to the microsecond", due=100.000001),
            arrives("to the microsecond", 100.000001, due=100.000001),
            s.OK,
        ),
        "early": (receipt("early"), arrives("early", 99.999), s.EARLY),
        "late": (receipt("late"), arrives("late", 105.1), s.LATE),
        "twice": (receipt("twice"), [*arrives("twice", 101), *arrives("twice", 102)], s.DUPLICATE),
        "gone": (receipt("gone"), [scheduled("gone")], s.LOST_IN_THE_LADDER),
        "dropped": (receipt("dropped"), [released("dropped", 101)], s.LOST_AFTER_RELEASE),
        "far": (receipt("far", due=9e9), [scheduled("far", due=9e9)], s.STILL_WAITING),
        "on its way": (receipt("on its way", due=soon), [], s.STILL_WAITING),
        "in the worker": (
            receipt("in the worker", due=soon),
            [released("in the worker", soon, due=soon)],
            s.STILL_WAITING,
        ),
        "redelivered": (
            receipt("redelivered"),
            [released("redelivered", 101), *arrives("redelivered", 102)],
            s.OK,
        ),
        "nacked": (receipt("nacked", status=s.NACKED), [scheduled("nacked")], s.NOT_PUBLISHED),
        "nacked, yet it came": (
            receipt("nacked, yet it came", status=s.NACKED),
            arrives("nacked, yet it came", 101),
            s.OK,
        ),
        "tried again": (receipt("tried again", status=s.NACKED), arrives("tried again", 101), s.OK),
        "before the journal": (
            receipt("before the journal", due=-100, sent=-200),
            [],
            s.UNDECIDED,
        ),
        "due when sent": (
            receipt("due when sent", due=-1, hops=0),
            [scheduled("due when sent", due=-1, hops=0), *arrives("due when sent", 0.1, due=-1)],
            s.OK,
        ),
        "due when sent, dropped": (
            # Its receipt counted on a hop, but the time had passed when the window was sent.
            receipt("due when sent, dropped", due=1, hops=1),
            [scheduled("due when sent, dropped", 2.0, due=1, hops=0)],
            s.LOST_AFTER_RELEASE,
        ),
        "due when sent, untold": (
            receipt("due when sent, untold", due=-1, hops=0),
            [],
            s.LOST_AFTER_RELEASE,
        ),
        "long due, just sent": (
            receipt("long due, just sent", due=1, hops=0, sent=soon),
            [scheduled("long due, just sent", soon, due=1, hops=0)],
            s.STILL_WAITING,
        ),
        "nacked, and just sent again": (
            receipt("nacked, and just sent again", due=1, status=s.NACKED),
            [scheduled("nacked, and just sent again", soon, due=1, hops=0)],
            s.NOT_PUBLISHED,
        ),
    }
    receipts = [case[0] for case in planted.values()]
    events = [event for case in planted.values() for event in case[1]]
    verdict_of = {row.task_id: row.verdict for row in judge(receipts, events).collect()}
    assert verdict_of == {name: case[2] for name, case in planted.items()}


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


#: What was taken back or changed while it waited. Each has a receipt that says due at 100.
AMENDED = {
    "cancelled": ([scheduled("x"), event(s.CANCELLED, "x", 101)], s.TAKEN_BACK),
    "cancelled as its worker died": (
        [scheduled("x"), released("x", 101), event(s.CANCELLED, "x", 102)],
        s.TAKEN_BACK,
    ),
    "cancelled, and published without the journal": ([event(s.CANCELLED, "x", 101)], s.TAKEN_BACK),
    "discarded by its worker": ([scheduled("x"), *revoked("x", 100.1)], s.TAKEN_BACK),
    "late, and expired by then": ([scheduled("x"), *revoked("x", 200)], s.LATE),
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


@pytest.mark.parametrize("times", [1, 2], ids=["once", "each event written twice"])
def test_what_was_amended_has_its_verdict_and_none_is_lost_for_it(judge, times):
    events = [
        (row[0], name, *row[2:]) for name, (given, _) in AMENDED.items() for row in given * times
    ]
    verdicts = judge([receipt(name) for name in AMENDED], events).cache()
    judged = {row.task_id: (row.verdict, row.postponed > 0) for row in verdicts.collect()}
    put_off = {name for name in AMENDED if name.startswith("postponed")}
    assert judged == {name: (case[1], name in put_off) for name, case in AMENDED.items()}
    assert summarize(verdicts)["postponed"] == len(put_off)


def test_a_receipt_of_an_amendment_is_no_message_and_says_what_ran_after_it(judge):
    planted = {
        "revoked": ([amendment("revoked", 10)], revoked("revoked", 101), s.TAKEN_BACK),
        "ran": ([amendment("ran", 10)], arrives("ran", 101), s.RAN_AFTER_CANCEL),
        "came too late": ([amendment("came too late", 102)], arrives("came too late", 101), s.OK),
        "waits": ([amendment("waits", 10, due=9e9)], [scheduled("waits")], s.LOST_IN_THE_LADDER),
        "not recorded": (
            [amendment("not recorded", 10, status=s.REFUSED)],
            arrives("not recorded", 101),
            s.OK,
        ),
        "rescheduled": (
            [amendment("rescheduled", 10, s.RESCHEDULE, due=200)],
            [*postponed("rescheduled", until=200), *arrives("rescheduled", 201, due=200)],
            s.PUT_OFF,
        ),
        "replaced": (
            [amendment("replaced", 10)],
            [*replaced("replaced", 200), *arrives("replaced", 201, due=200)],
            s.REPLACED,
        ),
    }
    receipts = [receipt(name) for name in planted]
    receipts += [row for amended, _, _ in planted.values() for row in amended]
    # It was never published.
    receipts.append(amendment("no message", 10))
    events = [row for _, given, _ in planted.values() for row in given]
    verdict_of = {row.task_id: row.verdict for row in judge(receipts, events).collect()}
    assert verdict_of == {name: case[2] for name, case in planted.items()}


def test_a_reschedule_that_was_recorded_moves_the_due_time_and_may_not_be_ignored(judge):
    planted = {
        # A worker that reads no amendments.
        "ignored": ([amendment("ignored", 10, s.RESCHEDULE, due=900)], 100.5, 100, False),
        # As if the journal had lost the event "postponed".
        "in time": ([amendment("in time", 10, s.RESCHEDULE, due=900)], 901, 100, s.OK),
        "late": ([amendment("late", 10, s.RESCHEDULE, due=900)], 950, 100, s.LATE),
        "came first": ([amendment("came first", 102, s.RESCHEDULE, due=900)], 101, 100, s.OK),
        "not recorded": (
            [amendment("not recorded", 10, s.RESCHEDULE, s.REFUSED, due=900)],
            101,
            100,
            s.OK,
        ),
        "twice": (
            [amendment("twice", at, s.RESCHEDULE, due=due) for at, due in ((10, 900), (20, 500))],
            501,
            100,
            s.OK,
        ),
    }
    receipts = [receipt(name) for name in planted]
    receipts += [row for amended, *_ in planted.values() for row in amended]
    events = [
        row for name, (_, at, due, _) in planted.items() for row in arrives(name, at, due=due)
    ]
    events.append(scheduled("waits"))
    receipts += [receipt("waits"), amendment("waits", 10, s.RESCHEDULE, due=END + 100)]
    rows = {row.task_id: row for row in judge(receipts, events).collect()}
    wanted = {name: verdict or s.RESCHEDULE_IGNORED for name, (*_, verdict) in planted.items()}
    assert {name: rows[name].verdict for name in planted} == wanted
    assert rows["in time"].lateness == pytest.approx(1)
    assert rows["twice"].lateness == pytest.approx(1)
    assert rows["waits"].verdict == s.STILL_WAITING


@pytest.mark.parametrize("verdict", [s.RAN_AFTER_CANCEL, s.RESCHEDULE_IGNORED])
def test_an_amendment_that_came_to_nothing_fails_the_audit(judge, verdict):
    is_cancel = verdict == s.RAN_AFTER_CANCEL
    amended = amendment("a", 10, s.CANCEL if is_cancel else s.RESCHEDULE, due=900)
    verdicts = judge([receipt("a"), amended], arrives("a", 101)).cache()
    assert [row.verdict for row in verdicts.collect()] == [verdict]
    summary = summarize(verdicts)
    name = verdict.replace(" ", "_")
    assert summary["thresholds"][name] == {"measured": 1, "allowed": 0, "passed": False}
    assert summary["outcome"] == "failed"
    assert summarize(verdicts, Thresholds(**{name: 1}))["passed"]


def test_what_still_waits_is_not_judged_yet(judge):
    waiting = [receipt("a", due=END + 10)]
    summary = summarize(judge(waiting, [scheduled("a", due=END + 10)]))
    assert summary["verdicts"][s.STILL_WAITING] == 1
    assert (summary["passed"], summary["outcome"]) == (False, "not judged yet")
    both = [*arrives("b", 101), scheduled("a", due=END + 10)]
    assert summarize(judge([*waiting, receipt("b")], both))["outcome"] == "passed"


def test_a_receipt_of_a_cancellation_is_of_all_retries(judge):
    events = [*arrives("a", 101), scheduled("a", 150, retries=1, due=200)]
    events += arrives("a", 201, retries=1, due=200)
    verdicts = judge([receipt("a"), amendment("a", 150)], events).collect()
    assert {row.retries: row.verdict for row in verdicts} == {0: s.OK, 1: s.RAN_AFTER_CANCEL}


def test_a_due_time_that_the_broker_refused_does_not_count(judge):
    receipts = [receipt("a", due=END, status=s.RETURNED), receipt("a", sent=10)]
    events = [*postponed("a", 200), *arrives("a", 201, due=200)]
    [row] = judge(receipts, events).collect()
    assert (row.verdict, row.lateness) == (s.PUT_OFF, 1.0)
    # Nobody knows until when it is postponed.
    [row] = judge(receipts, postponed("a", None)).collect()
    assert row.verdict == s.UNDECIDED


def test_what_is_delivered_again_has_its_patience_again(judge):
    released_twice = [released("a", 101), released("a", END - 10)]
    [row] = judge([receipt("a")], [scheduled("a"), *released_twice]).collect()
    assert (row.verdict, row.lateness) == (s.STILL_WAITING, 1.0)
    [row] = judge([receipt("a")], [scheduled("a"), *released_twice], patience=5).collect()
    assert row.verdict == s.LOST_AFTER_RELEASE


def test_receipts_of_before_there_were_amendments_are_judged(spark):
    receipts = spark.createDataFrame([receipt("a")], s.RECEIPTS).drop("action")
    journal = spark.createDataFrame([*arrives("a", 101), *LAST], s.JOURNAL)
    [row] = audit(receipts, journal).where("task_id = 'a'").collect()
    assert row.verdict == s.OK


#: What a clock says that is wrong: of one task, the events, its verdict, and how many of its times
#: are reported to be wrong.
YEAR_2999 = 31_000_000_000
HOUR = 3600
WRONG: dict[str, tuple[list[tuple[object, ...]], str, int]] = {
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


def test_events_with_a_wrong_clock_change_no_other_verdict_and_are_reported(judge):
    soon = END - 1
    table = {
        **WRONG,
        "waits": ([scheduled("x", due=soon)], s.STILL_WAITING, 0),
        "lost": ([scheduled("x")], s.LOST_IN_THE_LADDER, 0),
        "ok": ([scheduled("x"), *arrives("x", 101)], s.OK, 0),
    }
    events = [(row[0], name, *row[2:]) for name, (given, *_) in table.items() for row in given]
    receipts = [
        (*receipt(name)[:5], given[0][6], *receipt(name)[6:]) for name, (given, *_) in table.items()
    ]
    # The journal began later than the one, and one clock alone says when the other was published.
    receipts += [receipt("before", due=-100, sent=-200), receipt("sent in 2999", sent=YEAR_2999)]
    events += arrives("sent in 2999", 101)
    verdicts = judge(receipts, events).cache()
    judged = {row.task_id: (row.verdict, row.misdated) for row in verdicts.collect()}
    expected = {name: case[1:] for name, case in table.items()}
    assert judged == {**expected, "before": (s.UNDECIDED, 0), "sent in 2999": (s.OK, 1)}
    assert summarize(verdicts)["misdated"] == 11


@pytest.mark.usefixtures("local_times")
def test_a_row_says_all_that_is_known_of_a_task(judge, spark):
    events = [scheduled("a"), released("a", 101), executed("a", 101.5)]
    expected = ("a", 0, "key of a", "send", "mail", at(100), at(0), 3, at(101), 1.0, 1, 1)
    row = spark.createDataFrame([(*expected, "SUCCESS", 0, 0, s.OK)], s.VERDICTS)
    assertDataFrameEqual(judge([receipt("a")], events), row)


def test_what_counts_is_the_first_promise_that_the_broker_took_and_each_copys_own(judge):
    nacked, again = receipt("a", due=60, status=s.NACKED), receipt("a", due=7260, sent=7200)
    unknown = receipt("a", due=60, status="unknown")
    first, second = receipt("a", due=60), receipt("a", due=120)
    copies = [*arrives("a", 61, due=60), *arrives("a", 121, due=120)]
    # Receipts, events, and what is found: the due time, the lateness and the verdict.
    table = {
        "nacked, and taken two hours later": (
            [nacked, again],
            [scheduled("a", due=60), scheduled("a", 7200, due=7260), *arrives("a", 7261, due=7260)],
            (7260, 1.0, s.OK),
        ),
        "unknown, yet it came": (
            [unknown, again],
            [*arrives("a", 61, due=60), *arrives("a", 7261, due=7260)],
            (60, 1.0, s.DUPLICATE),
        ),
        "never taken": (
            [nacked, receipt("a", due=90, status=s.NACKED)],
            [scheduled("a", due=60)],
            (60, None, s.NOT_PUBLISHED),
        ),
        "taken, and then refused with a sooner due time": (
            [receipt("a", due=2 * END), receipt("a", due=60, sent=1, status=s.REFUSED)],
            [scheduled("a", due=2 * END)],
            (2 * END, None, s.STILL_WAITING),
        ),
        "sent twice": ([first, second], copies, (60, 1.0, s.DUPLICATE)),
        "sent twice, and the first came not": ([first, second], copies[2:], (60, 61.0, s.LATE)),
        "without receipts": (
            [],
            [scheduled("a", due=60), scheduled("a", due=120), *copies[2:]],
            (120, 1.0, s.OK),
        ),
        "a copy before its own time": (
            [first, second],
            [*arrives("a", 61, due=60), *arrives("a", 118, due=120)],
            (60, -2.0, s.EARLY),
        ),
    }
    receipts, events = [], []
    for name, (given, happened, _) in table.items():
        receipts += [(*row[:2], name, *row[3:]) for row in given]
        events += [(row[0], name, *row[2:]) for row in happened]
    verdict_of = {
        row.task_id: ((row.due - at(0).replace(tzinfo=None)).seconds, row.lateness, row.verdict)
        for row in judge(receipts, events).collect()
    }
    assert verdict_of == {name: expected for name, (*_, expected) in table.items()}


def test_receipts_of_rows_that_have_no_id_are_no_message(judge):
    refused = [(*receipt("a", status=s.REFUSED)[:2], None, *receipt("a")[3:5], None)] * 2
    refused = [(*columns, *receipt("a", status=s.REFUSED)[6:]) for columns in refused]
    verdicts = judge([receipt("a"), *refused], arrives("a", 101)).collect()
    assert {row.task_id: row.verdict for row in verdicts} == {"a": s.OK}


def test_a_retry_is_a_message_of_its_own_and_no_duplicate(judge):
    events = [*arrives("a", 101), scheduled("a", retries=1, due=200.0)]
    events += arrives("a", 200.5, retries=1, due=200.0)
    verdict_of = {row.retries: row.verdict for row in judge([receipt("a")], events).collect()}
    assert verdict_of == {0: s.OK, 1: s.OK}


def test_a_consumer_without_celery_has_its_message_when_it_is_released(judge):
    [row] = judge(None, [released("plain", 101, task=None)]).collect()
    assert (row.verdict, row.lateness) == (s.OK, 1.0)


def test_a_consumer_without_celery_has_no_duplicate_of_what_was_postponed(judge):
    events = [scheduled("plain", task=None), released("plain", 101, task=None)]
    events += [event(s.POSTPONED, "plain", 102, task=None)]
    events += [scheduled("plain", 102, due=200, task=None)]
    [row] = judge(None, events).collect()
    assert (row.verdict, row.lateness) == (s.LOST_IN_THE_LADDER, None)
    [row] = judge(None, [*events, released("plain", 201, due=200, task=None)]).collect()
    assert (row.verdict, row.lateness, row.released) == (s.PUT_OFF, 1.0, 2)


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
