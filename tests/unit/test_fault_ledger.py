"""The verdict of the fault scenarios: what it must see, it sees."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from dev.faults.ledger import (
    CANCELLED,
    CANCELLING,
    CONFIRMED,
    DELIVERED,
    DONE,
    DROPPED,
    FAILED,
    SENT,
    Book,
    judge,
)

DUE = 100.0


def sent(name="m", at=90.0, due=DUE, queues=("q",), **more):
    return {
        "event": SENT,
        "id": name,
        "at": at,
        "due": due,
        "exchange": "",
        "routing_key": "q",
        "queues": list(queues),
        **more,
    }


def confirmed(name="m", at=91.0):
    return {"event": CONFIRMED, "id": name, "at": at}


def failed(name="m", at=91.0):
    return {"event": FAILED, "id": name, "at": at, "error": "?"}


def delivered(name="m", at=100.1, **more):
    known = {"queue": "q", "exchange": "", "routing_key": "q", "body": name}
    return {"event": DELIVERED, "id": name, "at": at, **known, **more}


def done(name="m", at=100.2):
    return {"event": DONE, "id": name, "at": at}


GOOD = [sent(), confirmed(), delivered(), done()]


@pytest.mark.parametrize(
    ("entries", "lost_early_misdelivered", "duplicates", "refused"),
    [
        (GOOD, (0, 0, 0), 0, 0),
        # Only what is confirmed is promised, and only what is done has arrived.
        ([sent(), confirmed()], (1, 0, 0), 0, 0),
        ([sent()], (0, 0, 0), 0, 0),
        ([sent(), failed()], (0, 0, 0), 0, 1),
        ([sent(), failed(), confirmed(at=92.0), delivered(), done()], (0, 0, 0), 0, 0),
        ([sent(), confirmed(), delivered()], (1, 0, 0), 0, 0),
        ([sent(queues=[]), confirmed()], (0, 0, 0), 0, 0),
        # A millisecond counts.
        ([sent(), confirmed(), delivered(at=99.999), done()], (0, 1, 0), 0, 0),
        # Again, by a publisher who does not know: it was due when it was due first.
        ([*GOOD, sent(at=95.0, due=105.0), delivered(at=106.0)], (0, 0, 0), 1, 0),
        ([*GOOD, delivered(at=107.0), delivered(at=108.0)], (0, 0, 0), 2, 0),
        ([sent(), confirmed(), delivered(queue="other"), done()], (0, 0, 1), 0, 0),
        ([sent(), confirmed(), delivered(routing_key="0.1.@..q"), done()], (0, 0, 1), 0, 0),
        ([sent(), confirmed(), delivered(exchange="kbd.v2.delivery"), done()], (0, 0, 1), 0, 0),
        ([sent(), confirmed(), delivered(body="another's"), done()], (0, 0, 1), 0, 0),
        ([*GOOD, delivered("unheard of")], (0, 0, 1), 0, 0),
    ],
)
def test_the_verdict_counts(entries, lost_early_misdelivered, duplicates, refused):
    verdict = judge(entries)
    counted = (len(verdict.lost), len(verdict.early), len(verdict.misdelivered))
    assert counted == lost_early_misdelivered
    assert verdict.is_clean == (counted == (0, 0, 0))
    assert (verdict.duplicates, verdict.refused) == (duplicates, refused)


def cancelled(name="m", at=92.0):
    return {"event": CANCELLED, "id": name, "at": at}


def cancelling(name="m", at=91.5):
    return {"event": CANCELLING, "id": name, "at": at}


def dropped(name="m", at=100.1):
    return {"event": DROPPED, "id": name, "at": at}


CANCEL = [sent(), confirmed(), cancelling(), cancelled()]
#: Two with one key.
KEYED = [
    *(sent("1", key="k"), confirmed("1")),
    *(sent("2", at=92.0, key="k"), confirmed("2", at=93.0)),
    *(delivered("2"), done("2")),
]


@pytest.mark.parametrize(
    ("entries", "amended", "lost_ran_dropped"),
    [
        (GOOD, 0, (0, 0, 0)),
        (CANCEL, 1, (0, 0, 0)),
        ([*CANCEL, dropped()], 1, (0, 0, 0)),
        ([*CANCEL, delivered(), done()], 1, (0, 1, 0)),
        # A race that was lost is none of ours.
        ([*CANCEL[:3], cancelled(at=99.0), delivered(), done()], 1, (0, 0, 0)),
        ([*CANCEL[:3], cancelled(at=99.0), delivered(at=120.0), done()], 1, (0, 0, 0)),
        # Who had no confirm of it knows nothing.
        ([*CANCEL[:3], delivered(), done()], 0, (0, 0, 0)),
        (CANCEL[:3], 0, (0, 0, 0)),
        ([*GOOD, dropped()], 0, (0, 0, 1)),
        (KEYED, 1, (0, 0, 0)),
        ([*KEYED, dropped("1")], 1, (0, 0, 0)),
        ([*KEYED, delivered("1")], 1, (0, 1, 0)),
        (KEYED[:-2], 1, (1, 0, 0)),
        ([*KEYED, dropped("2")], 1, (0, 0, 1)),
        # Killed before the record of the second was confirmed: both may run.
        (
            [*KEYED[:3], {**KEYED[3], "recorded": False}, *KEYED[4:], delivered("1"), done("1")],
            0,
            (0, 0, 0),
        ),
    ],
)
def test_the_verdict_on_amendments_counts(entries, amended, lost_ran_dropped):
    verdict = judge(entries)
    counted = (len(verdict.lost), len(verdict.ran), len(verdict.dropped))
    assert (verdict.amended, counted) == (amended, lost_ran_dropped)
    assert verdict.is_clean == (counted == (0, 0, 0))


def test_a_moved_clock_excuses_its_step_and_no_more():
    entries = [sent(), confirmed(), delivered(at=95.0), done()]
    assert judge(entries).early
    assert not judge(entries, ahead=5.0).early
    assert judge(entries, ahead=4.9).early


def test_lateness_is_of_the_first_delivery():
    entries = [
        *(sent(f"{n}") for n in range(100)),
        *(delivered(f"{n}", at=DUE + n / 100) for n in range(100)),
        delivered("0", at=DUE + 50),
    ]
    verdict = judge(entries)
    assert [verdict.late(share) for share in (0.5, 0.99, 1)] == pytest.approx([0.5, 0.99, 0.99])


def test_what_is_written_stays_when_the_writer_is_killed_in_the_next_instant(tmp_path):
    path = tmp_path / "book"
    program = """
import os, signal, sys
from pathlib import Path
from dev.faults.ledger import Book
book = Book(Path(sys.argv[1]))
for number in range(100):
    book.write("sent", str(number))
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, path],
        env={**os.environ, "PYTHONPATH": "."},
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    assert [entry["id"] for entry in Book(path).entries()] == [str(n) for n in range(100)]


def test_half_a_line_is_not_read(tmp_path):
    book = Book(tmp_path / "book")
    book.write(SENT, "whole")
    with book.path.open("a") as file:
        file.write('{"event": "se')
    assert [entry["id"] for entry in book.entries()] == ["whole"]
