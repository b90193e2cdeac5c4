"""The order that the pages on performance claim is that of every recorded run."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.report import section_of
from docs.generate.benchmarks import RESULTS, figure

#: A section, a figure, and the rows that the pages rank by it, from the least to the most.
CLAIMS = [
    # Entered at the top, a message costs most; on its own ladder, it costs least.
    ("burst", "cpu_us", "floor < ours < nservicebus < celery-native < from-top"),
    ("burst", "p99", "ours < nservicebus < celery-native < from-top"),
    # In a burst, a queue per delay is on time, costs more than our ladder, and takes messages more
    # slowly; at an easy rate it costs less.
    ("burst", "cpu_us", "ours < symfony < celery-native"),
    ("burst", "p99", "symfony < ours"),
    ("burst", "publish_rate", "symfony < ours"),
    ("easy", "cpu_us", "symfony < ours"),
    ("burst", "cpu_us", "ours < two-bits < binary < nservicebus"),
    ("burst-classic", "cpu_us", "ours < two-bits < binary < celery-native < from-top"),
    ("burst-classic", "p99", "ours < celery-native"),
    ("easy", "cpu_us", "floor < ours < binary < celery-native"),
    ("easy", "cpu_us", "ours < nservicebus < celery-native < from-top"),
    ("hour", "cpu_us", "ours < two-bits < binary < nservicebus < celery-native"),
    ("hour", "p99", "ours < nservicebus < celery-native"),
    ("day", "cpu_us", "ours < two-bits < binary < celery-native"),
    ("day", "cpu_us", "ours < nservicebus < celery-native"),
    ("day", "p99", "ours < nservicebus < celery-native"),
    ("hops", "cpu_us", "floor < ours-1 < ours-2 < ours-4 < ours-6"),
    ("sustained", "publish_rate", "celery-native < nservicebus < ours"),
    ("herd", "rate", "celery-native < nservicebus < ours < bare-a-core"),
    ("herd", "rate", "lanes < ours"),
    ("herd-100000", "rate", "celery-native < ours < bare-a-core"),
    ("herd-parts", "rate", "headers-read < ours < bare-seven"),
    ("herd-parts", "release_cpu_us", "with-headers < ours"),
    ("herd-parts", "consumer_us", "ours < headers-read"),
    ("prefetch", "last_ms", "128 < 32"),
    ("prefetch", "cpu_us", "128 < 32"),
    ("wal", "rate", "64 < 512"),
    ("lanes", "cpu_us", "one node < 1 lane < 2 lanes"),
    ("lanes", "busiest", "2 lanes < 1 lane"),
    ("tick", "p99", "31 < 62 < 125 < 250 < 500 < 1000"),
    ("tick", "waits", "1000 < 500 < 250 < 125 < 62 < 31"),
    ("publishing", "cpu_us", "batch < kombu < ours-delayed < ours-journal"),
    ("publishing", "cpu_us", "celery-ours < celery < celery-held"),
    ("size", "bytes", "ours < ours-delayed < celery < celery-native < celery-ours-delayed"),
    ("delivery", "instructions", "kombu < ours < ours-amendments < kombu-native < ours-delayed"),
    ("delivery", "cpu_us", "kombu < ours-delayed < ours-delayed-journal"),
    ("worker", "per_task", "ours < celery"),
]
#: Runs of a slower machine that do not show an order, as the page on the broker's settings says.
UNRANKED = {
    ("slower-machine/prefetch", "last_ms"),
    ("slower-machine/prefetch", "cpu_us"),
    ("slower-machine/wal", "rate"),
}
#: The same of one publish beside another: the ratio of their CPU is below 1, or above.
PAIRS = {"celery-undelayed": "less", "celery-delayed": "more", "batch": "less"}


def runs_of(section):
    """Return the runs of a section: of both releases, and the second ones."""
    return [name for name in RESULTS if section_of(name) == section]


@pytest.mark.parametrize(
    ("run", "measured", "order"),
    [(run, measured, order) for section, measured, order in CLAIMS for run in runs_of(section)],
)
def test_a_ranking_that_the_pages_claim_is_that_of_every_run(run, measured, order):
    ranked = [(row, figure(run, row, measured)) for row in order.split(" < ")]

    wrong = [(less, more) for less, more in pairwise(ranked) if not less[1] < more[1]]

    assert bool(wrong) == ((run, measured) in UNRANKED), wrong


@pytest.mark.parametrize("run", runs_of("pairs"))
def test_a_publish_is_cheaper_or_dearer_than_another_as_the_pages_claim(run):
    found = RESULTS[run]["found"]

    for pair, claim in PAIRS.items():
        assert (found[pair]["cpu_us"]["ratio"] > 1) == (claim == "more"), pair


@pytest.mark.parametrize(
    ("run", "row", "counted"),
    [
        (run, row, counted)
        for run, result in RESULTS.items()
        for row, figures in result["found"].items()
        for counted in ("early", "missing")
        if counted in figures
    ],
)
def test_no_message_was_early_or_missing_in_a_recorded_run(run, row, counted):
    assert figure(run, row, counted, "most") == 0


@pytest.mark.parametrize("section", sorted({section for section, _, _ in CLAIMS}))
def test_what_is_ranked_is_recorded(section):
    assert runs_of(section)
