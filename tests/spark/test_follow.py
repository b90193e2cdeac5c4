"""A continuous audit: a day that is fed through in steps."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from kombu_binary_delay.spark import schema as s
from kombu_binary_delay.spark.audit import audit
from kombu_binary_delay.spark.follow import follow, read_verdicts

pytestmark = pytest.mark.slow

NOW = datetime.now(UTC).replace(microsecond=0) - timedelta(days=1)
HOUR = 3600.0
#: When the journal is exported, and a step follows.
EXPORTS = [9 * HOUR, 24 * HOUR]


def at(seconds):
    return NOW + timedelta(seconds=seconds)


def event(kind, task_id, seconds, due, state=None):
    return (
        kind,
        task_id,
        0,
        "send",
        "mail",
        at(seconds),
        at(due),
        "l",
        3,
        state,
        int(seconds * 10),
    )


def arrives(task_id, seconds, due):
    return [
        event(s.RELEASED, task_id, seconds, due),
        event(s.EXECUTED, task_id, seconds + 0.1, due, "SUCCESS"),
    ]


def receipt(task_id, due, seen, published=-60.0, action=s.PUBLISH, job="job"):
    status = s.PUBLISHED if action == s.PUBLISH else s.RECORDED
    when = (at(due), at(published))
    return seen, (job, "k", task_id, "send", "mail", *when, 3, 0, 0, status, None, action)


#: For each kind of task: its events after that of its publish, by its due time.
KINDS = {
    "ok": lambda i, d: arrives(i, d + 0.2, d),
    "late": lambda i, d: arrives(i, d + 60, d),
    "lost": lambda i, d: [],
    "found again": lambda i, d: arrives(i, d + 6 * HOUR, d),
    "twice, hours later": lambda i, d: [*arrives(i, d + 0.2, d), *arrives(i, d + 6 * HOUR, d)],
    "cancelled": lambda i, d: [event(s.CANCELLED, i, d + 0.2, d)],
    "ran after cancel": lambda i, d: arrives(i, d + 0.2, d),
    "rescheduled": lambda i, d: arrives(i, d + 2 * HOUR + 0.2, d),
    "postponed": lambda i, d: [
        event(s.POSTPONED, i, d + 0.2, d),
        event(s.SCHEDULED, i, d + 0.2, d + 4 * HOUR),
        *arrives(i, d + 4 * HOUR + 0.2, d + 4 * HOUR),
    ],
}


def day():
    """Return all receipts, each with the time from which it can be seen, and all events."""
    receipts, events = [], []
    for number in range(60):
        kind = list(KINDS)[number % len(KINDS)]
        due, task_id = number * 26 * HOUR / 60 + 1, f"{kind} {number}"
        receipts.append(receipt(task_id, due, seen=0.0))
        if kind == "ran after cancel":
            # The receipt is seen long after.
            receipts.append(receipt(task_id, due, due + 3 * HOUR, due - 5, s.CANCEL))
        if kind == "rescheduled":
            receipts.append(receipt(task_id, due + 2 * HOUR, due, due - 5, s.RESCHEDULE))
        events += [event(s.SCHEDULED, task_id, -60 + number / 100, due), *KINDS[kind](task_id, due)]
    return receipts, events


def verdicts_of(df):
    return {
        row.task_id: row.verdict for row in df.where(f"verdict <> '{s.STILL_WAITING}'").collect()
    }


def test_after_two_steps_the_verdicts_are_those_of_an_audit_of_all_that_is_there(spark, tmp_path):
    receipts, events = day()
    output = str(tmp_path / "followed")
    assert read_verdicts(spark, output).count() == 0
    for until in EXPORTS:
        mark = (s.COMPLETE, *[None] * 4, at(until), *[None] * 5)
        seen = [row for when, row in receipts if when <= until]
        sent = spark.createDataFrame(seen, s.RECEIPTS)
        happened = [row for row in events if row[5] <= at(until)]
        journal = spark.createDataFrame([*happened, mark], s.JOURNAL).cache()
        follow(sent, journal, output)
    followed = verdicts_of(read_verdicts(spark, output))
    assert followed == verdicts_of(audit(sent, journal))
    # A step that is repeated has nothing to say.
    assert follow(sent, journal, output).count() == 0
    assert {s.LOST_IN_THE_LADDER, s.RAN_AFTER_CANCEL, s.DUPLICATE} <= set(followed.values())
    assert followed["found again 3"] == s.LATE


def test_a_step_is_of_one_job_and_of_the_window(spark, tmp_path):
    sent = [receipt("mine", 10, 0), receipt("theirs", 10, 0, job="another")]
    sent.append(receipt("old", -9 * 86_400.0, 0, -9 * 86_400.0))
    receipts = spark.createDataFrame([row for _, row in sent], s.RECEIPTS)
    events = [*arrives("mine", 11, 10), *arrives("theirs", 11, 10)]
    journal = spark.createDataFrame([*events, *arrives("later", 5000, 5000)], s.JOURNAL)
    output = str(tmp_path / "followed")
    follow(receipts, journal, output, job_id="job")
    assert verdicts_of(read_verdicts(spark, output)) == {"mine": s.OK}
    with pytest.raises(ValueError, match="job_id needs receipts"):
        follow(None, journal, output, job_id="job")
