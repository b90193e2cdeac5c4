"""The table of what holds where says what recorded runs found, and no more."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.generate import conformance
from tests.conformance.cases import CASES
from tests.conformance.record import expected

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def runs():
    return conformance.load()


def outcomes(runs, *wanted):
    return {
        ((result["on"], result["ladder"], result["queue_type"]), case)
        for run in runs
        for result in run["results"]
        for outcome in wanted
        for case in result.get(outcome, ())
    }


def test_every_case_that_the_suite_runs_has_held_in_a_recorded_run_and_no_other_is_recorded(runs):
    cases = {(column, case.name) for column, case in expected()}

    assert outcomes(runs, "held") == cases, "record a run, see CONTRIBUTING.md"
    assert outcomes(runs, "held", "failed") == cases


def test_a_run_is_kept_in_place_of_the_last_of_its_versions_with_others_that_found_the_same(
    runs, tmp_path
):
    first, *_, last = runs
    for run in (first, last, {**first, "results": last["results"]}):
        conformance.keep(run, tmp_path)

    assert conformance.load(tmp_path) == [{**first, "results": last["results"]}, last]
    assert len(list(tmp_path.iterdir())) == 1


def test_no_two_cases_have_one_name():
    names = [case.name for case in CASES]

    assert len(names) == len(set(names))


def test_every_rabbitmq_and_every_celery_that_tox_crosses_is_recorded(runs):
    env_list = (ROOT / "tox.ini").read_text()
    crossed = re.search(r"py\{([\d,]+)\}-celery\{([\d,]+)\}-rabbitmq\{([\d,]+)\}", env_list)
    assert crossed
    pythons, celeries, rabbitmqs = (
        {f"{version[0]}.{version[1:]}" for version in group.split(",")}
        for group in crossed.groups()
    )

    def recorded(what):
        return {".".join(run[what].split(".")[:2]) for run in runs}

    assert recorded("rabbitmq") == rabbitmqs
    assert recorded("celery") == celeries == recorded("kombu")
    assert recorded("python") >= pythons


def test_the_page_has_a_row_for_every_case_and_every_rabbitmq(runs):
    page = (ROOT / "docs" / "reference" / "compatibility.md").read_text()
    names = {case.name.replace("*", r"\*") for _, case in expected()}

    assert {row[0] for row in conformance.cases_table(runs, ladders=False)[1:]} == names
    assert {row[0] for row in conformance.runs_table(runs)[1:]} == {run["rabbitmq"] for run in runs}
    assert "<!-- generated: conformance -->" in page


def record(held=(), failed=(), *, rabbitmq="4.3.6", queue_type="quorum", on="broker"):
    result = {"on": on, "ladder": "default", "queue_type": queue_type}
    results = [{**result, "held": list(held), "failed": list(failed)}]
    return {
        "rabbitmq": rabbitmq,
        "celery": "5.7.0",
        "kombu": "5.7.1",
        "python": "3.13",
        "results": results,
    }


def test_what_failed_once_does_not_hold_and_the_table_says_where():
    runs = [record(held=["a"]), record(failed=["a"])]

    assert conformance.cases_table(runs, ladders=False) == [
        ["What holds", "4.3"],
        ["a", "**no**: RabbitMQ 4.3.6, Celery 5.7.0, Python 3.13"],
    ]
    assert conformance.runs_table(runs) == [
        ["RabbitMQ", "Celery 5.7"],
        ["4.3.6", "Python 3.13: all 1<br>Python 3.13: **1 of 1 failed**"],
    ]


def test_of_a_ladder_the_table_says_where_it_was_tried():
    runs = [record(held=["a"], rabbitmq="3.8.9"), record(held=["a"]), record(held=["a"])]

    assert conformance.cases_table(runs, ladders=True) == [
        ["What holds", "Default"],
        ["a", "3.8, 4.3"],
    ]


def test_what_did_not_run_somewhere_is_left_open_there():
    runs = [record(held=["a *"]), record(held=["b"], rabbitmq="3.8.9", queue_type="classic")]

    assert conformance.cases_table(runs, ladders=False) == [
        ["What holds", "4.3", "3.8"],
        ["a \\*", "yes", ""],
        ["b", "", "yes"],
    ]
