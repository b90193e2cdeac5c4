"""The pages of an audit and of a plan, as a browser shows them."""

from __future__ import annotations

import re
import shutil
from datetime import UTC, datetime, timedelta

import pytest
from playwright.sync_api import sync_playwright
from pyspark.sql import functions as F

from kombu_binary_delay.spark import schema as s
from kombu_binary_delay.spark.audit import Thresholds
from kombu_binary_delay.spark.plan import Limits, plan
from kombu_binary_delay.spark.report import OFFENDERS, VERDICTS, audit_page, plan_page, seconds

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


@pytest.fixture(scope="module")
def verdicts(spark):
    """Tasks that are due over an hour, one in a hundred lost, and each a little later."""
    due = F.timestamp_seconds(F.lit(NOON.timestamp()) + F.col("id") * 2)
    late = F.lit(0.02) + (F.col("id") % 100) / 1000
    lost = F.col("id") % 100 == 7
    rows = spark.range(1800).select(
        F.concat(F.lit("task-"), "id").alias("task_id"),
        F.lit(0).alias("retries"),
        F.lit("key <b>").alias("key"),
        F.lit("shop.remind").alias("task"),
        F.concat(F.lit("mail-"), F.col("id") % 3).alias("queue"),
        due.alias("due"),
        F.lit(NOON - timedelta(minutes=10)).alias("published_at"),
        (F.col("id") % 9).cast("int").alias("hops"),
        F.when(~lost, due + F.make_dt_interval(secs=late)).alias("arrived_at"),
        F.when(~lost, late).alias("lateness"),
        F.lit(1).alias("released"),
        F.lit(1).alias("executed"),
        F.lit("SUCCESS").alias("state"),
        F.lit(0).alias("postponed"),
        F.lit(0).alias("misdated"),
        F.when(lost, s.LOST_IN_THE_LADDER).otherwise(s.OK).alias("verdict"),
    )
    return rows.cache()


@pytest.fixture(scope="module")
def pages(spark, verdicts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    text, summary = audit_page(verdicts, Thresholds(p99=1), ["nightly <i>"])
    assert summary["outcome"] == "failed"
    (folder / "audit.html").write_text(text)
    rows = spark.range(5000).select(
        F.lit(NOON).alias("published"), (F.col("id") % 7200).cast("double").alias("countdown")
    )
    planned = plan(rows).cache()
    (folder / "plan.html").write_text(plan_page(planned, Limits(waiting=10), 0.5, "r.parquet"))
    return folder


def test_the_page_of_an_audit_says_what_failed_and_names_the_offenders(pages):
    text = (pages / "audit.html").read_text()
    assert "<h1>Delayed tasks of nightly &lt;i&gt;</h1>" in text
    assert text.count("task-") == 18 + OFFENDERS - 18
    assert "key &lt;b&gt;" in text
    for verdict in s.VERDICT_NAMES:
        assert VERDICTS[verdict][1] in text.replace("&#39;", "'")
    # It fetches nothing, and runs nothing.
    assert not re.findall(r"<script|<link|src=|url\(|@import", text)
    assert len(text) < 300_000


@pytest.mark.parametrize("name", ["audit", "plan"])
def test_a_page_fits_a_phone_and_a_desktop_in_light_and_dark(pages, name):
    program = next(filter(None, map(shutil.which, BROWSERS)))
    inks = set()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for scheme, width in (("light", 400), ("light", 1400), ("dark", 400), ("dark", 1400)):
            page = browser.new_page(viewport={"width": width, "height": 900})
            page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
            page.goto((pages / f"{name}.html").as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.locator("section.chart svg").count() >= 3
            line = page.locator("section.chart svg path[stroke-width='1.8']").first
            inks.add((scheme, line.evaluate("line => getComputedStyle(line).stroke")))
        browser.close()
    # Two colours, and each is one of the page's.
    assert len(inks) == 2
    assert len({ink for _, ink in inks}) == 2


def test_a_report_of_nothing_is_a_page_all_the_same(spark):
    text, summary = audit_page(spark.createDataFrame([], s.VERDICTS))
    assert (summary["tasks"], summary["outcome"]) == (0, "failed")
    assert 'section class="chart"' not in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0123, "12.3 ms"), (1.5, "1.5 s"), (-7200, "-2 h"), (90, "90 s"), (None, "none")],
)
def test_a_time_has_the_unit_that_suits_it(value, text):
    assert seconds(value) == text
