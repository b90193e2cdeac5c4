from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, cast

import pytest
from pyspark.sql import functions as F

from kombu_binary_delay.spark.cli import progress
from kombu_binary_delay.spark.cli.progress import Step, following, span
from tests.waits import PATIENCE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (Step(0, 8, 3.0), "0 of 8 parts"),
        (Step(0, 1, 3.0), "0 of 1 part"),
        (Step(1000, 4000, 50.0), "1,000 of 4,000 parts, 20.0/s, 02:30 left"),
        (Step(1, 4000, 2.0), "1 of 4,000 parts, 0.5/s, 2:13:18 left"),
    ],
)
def test_a_step_has_a_rate_and_a_time_left(step, text):
    assert str(step) == text
    assert span(59.6) == "01:00"


def test_a_log_has_a_line_for_the_step_that_runs_and_one_for_each_phase(spark, monkeypatch, capsys):
    monkeypatch.setattr(progress, "_LOOK", 0.05)
    monkeypatch.setattr(progress, "_LINE", 0.1)

    def slow(number):
        time.sleep(2)
        return number

    with following(spark) as phase:
        phase("first")
        spark.range(0, 4, 1, 4).select(F.udf(slow, "long")("id")).collect()
        phase("second", "0 of 7 rows")
        phase("second", "3 of 7 rows")
        said, deadline = "", time.monotonic() + PATIENCE
        while "3 of 7" not in said and time.monotonic() < deadline:
            time.sleep(0.01)
            said += capsys.readouterr().err
    lines = (said + capsys.readouterr().err).splitlines()
    assert any(" of 4 parts" in line for line in lines if line.startswith("first: "))
    # What a phase says of its rows is in place of the steps.
    assert any(re.match(r"second: \d\d:\d\d, 3 of 7 rows", line) for line in lines)
    assert lines[-1].startswith("second: 0")


def test_where_spark_does_not_say_it_is_the_time_alone(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_LOOK", 0.01)
    monkeypatch.setattr(progress, "_LINE", 0.01)
    seen = ""
    with following(cast("SparkSession", None)) as phase:
        phase("planning")
        deadline = time.monotonic() + PATIENCE
        while "planning: 00:" not in seen and time.monotonic() < deadline:
            time.sleep(0.01)
            seen += capsys.readouterr().err
    assert "planning: 00:" in seen
    assert "parts" not in seen
