from __future__ import annotations

import copy
import re
import shutil
import subprocess
from collections import Counter
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser

import pypdfium2
import pytest
from pyspark.sql import functions as F

from kombu_binary_delay import Ladder
from kombu_binary_delay.spark import schema as s
from kombu_binary_delay.spark.audit import Thresholds
from kombu_binary_delay.spark.plan import plan
from kombu_binary_delay.spark.report.figures import (
    BINS,
    GROUPS,
    OFFENDERS,
    checked_depths,
    figures,
)
from kombu_binary_delay.spark.report.page import page

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


def many(spark, count):
    """Tasks that are due over an hour, one in a thousand lost, and each a little later."""
    due = F.timestamp_seconds(F.lit(NOON.timestamp()) + F.col("id") * 3600 / count)
    late = F.lit(0.02) + (F.col("id") % 100) / 1000
    lost = F.col("id") % 1000 == 7
    arrived = F.timestamp_micros(F.unix_micros(due) + F.round(late * 1_000_000).cast("bigint"))
    return spark.range(count).select(
        F.concat(F.lit("task-"), "id").alias("task_id"),
        F.lit(0).alias("retries"),
        F.concat(F.lit("key <b>"), "id").alias("key"),
        F.when(F.col("id") % 2 == 0, "shop.pay").otherwise("shop.remind").alias("task"),
        F.concat(F.lit("mail-"), F.col("id") % 3).alias("queue"),
        due.alias("due"),
        F.lit(NOON - timedelta(minutes=10)).alias("published_at"),
        (F.col("id") % 9).cast("int").alias("hops"),
        F.when(~lost, arrived).alias("arrived_at"),
        F.when(~lost, late).alias("lateness"),
        F.when(~lost, 1).otherwise(0).alias("released"),
        F.when(~lost, 1).otherwise(0).alias("executed"),
        F.lit("SUCCESS").alias("state"),
        F.lit(0).alias("postponed"),
        F.lit(0).alias("misdated"),
        F.when(lost, s.LOST_IN_THE_LADDER).otherwise(s.OK).alias("verdict"),
    )


@pytest.fixture(scope="module")
def verdicts(spark):
    return many(spark, 20_000).cache()


@pytest.fixture(scope="module")
def whole(spark, verdicts):
    rows = verdicts.select("due", F.col("published_at").alias("published"))
    planned = plan(rows.withColumnRenamed("due", "eta"), Ladder.binary())
    depths = planned.where("queue is not null").select(
        F.col("minute").alias("at"), "queue", "waiting"
    )
    found = figures(verdicts, thresholds=Thresholds(p99=1), plan=planned, depths=depths)
    return found, page(found)


def printed(source, target):
    """Print a page in a real browser, and give the text of each sheet."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        # dev/install.sh brings one; Ubuntu has none in its packages.
        pytest.skip(f"a browser is needed, one of {', '.join(BROWSERS)}")
    # Its sandbox takes what a container does not give.
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer"]
    options += [f"--user-data-dir={target.parent / 'profile'}", f"--print-to-pdf={target}"]
    subprocess.run(
        [browser, *options, source.as_uri()], check=True, capture_output=True, timeout=600
    )
    with pypdfium2.PdfDocument(target) as document:
        return [sheet.get_textpage().get_text_range() for sheet in document]


def test_the_figures_add_up_to_the_tasks(whole):
    found, _ = whole
    assert sum(found["due"]) == sum(found["published"]) == 20_000
    assert sum(found["arrived"]) == sum(count for *_, count in found["histogram"]) == 19_980
    assert found["waiting"][-1] == 20
    assert found["planned"][""]["waiting"][0] == 20_000
    assert {each["verdict"] for each in found["offenders"][:20]} == {s.LOST_IN_THE_LADDER}


def test_what_was_seen_is_shown_beside_what_was_planned(whole):
    found, _ = whole
    queue = max(found["seen"], key=lambda name: max(found["seen"][name]))
    assert max(found["seen"][queue]) == max(found["planned"][queue]["waiting"])


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ("'' at, 'q' queue", r"the columns at, queue, waiting, and waiting is missing, got \['at'"),
        ("5 at, 'q' queue, 1 waiting", "at must be a timestamp, or .* got int; use timestamp_sec"),
        ("now() at, 'q' queue, true waiting", "waiting must be a whole number, got boolean; use"),
        ("'31.01.2030' at, 'q' queue, 1 waiting", "at '31.01.2030', queue 'q', waiting '1'; give"),
        ("'2030-01-31' at, 'q' queue, '' waiting", "cannot be read: at '2030-01-31', .*waiting ''"),
        ("'2030-01-31' at, 'q' queue, '12.5' waiting", "waiting '12.5'; give at as a timestamp"),
    ],
)
def test_depths_that_cannot_be_read_are_refused(spark, columns, words):
    with pytest.raises(ValueError, match=words):
        checked_depths(None, spark.sql(f"select {columns}"))


def test_the_page_is_one_file_that_fetches_nothing_and_runs_nothing(whole):
    _, text = whole
    assert not re.search(r"(src|href)=|@import|url\(|<script|https?://", text)


def test_the_page_is_well_formed_and_escapes_what_users_named(whole):
    _, text = whole

    class Reader(HTMLParser):
        open_tags: list[str] = []  # noqa: RUF012 - of one page

        def handle_starttag(self, tag, attrs):
            if tag not in ("meta", "line", "rect", "path", "th"):
                self.open_tags.append(tag)

        def handle_startendtag(self, tag, attrs):
            pass

        def handle_endtag(self, tag):
            if tag not in ("rect", "path", "th"):
                assert self.open_tags.pop() == tag

    reader = Reader()
    reader.feed(text)
    assert reader.open_tags == []
    assert "key &lt;b&gt;" in text
    assert "key <b>" not in text


def test_the_page_says_the_verdicts_and_whether_they_pass(whole):
    found, text = whole
    assert '<span class="verdict bad">failed</span>' in text
    assert "<b>20</b><span>lost in the ladder</span>" in text
    assert "20,000 tasks, 2030-01-01 11:50:00 to 2030-01-01 12:59" in text
    assert "<h1>Delayed tasks of a &amp; b, c</h1>" in page({**found, "jobs": ["a & b", "c"]})


def test_the_page_says_how_many_were_postponed_and_whose_clocks_are_wrong(whole):
    found, _ = whole
    text = page({**found, "summary": {**found["summary"], "postponed": 1_234, "misdated": 2}})
    assert '<p class="lead">20,000 tasks, 1,234 of them postponed, 2030-' in text
    assert '<span class="verdict so-so">2 with an event of a wrong clock</span>' in text


@pytest.mark.parametrize(
    ("counts", "limits", "badges", "judgement"),
    [
        ({s.OK: 9}, {}, ["passed"], ("No limits were set.",)),
        (
            {s.OK: 1_842, s.LATE: 1_355},
            dict.fromkeys(("early", "lost", "unpublished", "unknown"), (0, 0)),
            ["passed", "1,355 of 3,197 late"],
            (
                "Keeps the limits of: early, lost, unpublished, unknown.",
                "Without a limit: duplicates, late, p99.",
            ),
        ),
        (
            {s.OK: 900, s.LATE: 9, s.LOST_AFTER_RELEASE: 2, s.TAKEN_BACK: 30},
            {"lost": (2, 0), "p99": (3.0, 5.0)},
            ["failed"],
            ("Exceeds the limits of: lost.",),
        ),
        (
            {s.OK: 90, s.LATE: 10},
            {"late": (10, 20), "p99": (7.0, 12.0), "unpublished": (0, 0), "unknown": (0, 9)},
            ["passed"],
            (
                "Keeps the limits of: late, p99, unpublished, unknown.",
                "Without a limit: early, lost, duplicates.",
            ),
        ),
    ],
)
def test_the_page_says_against_what_it_passed_and_warns_of_what_has_no_limit(
    whole, counts, limits, badges, judgement
):
    found, _ = whole
    held = {
        name: {"measured": measured, "allowed": allowed, "passed": measured <= allowed}
        for name, (measured, allowed) in limits.items()
    }
    summary = {
        "tasks": sum(counts.values()),
        "verdicts": {**dict.fromkeys(s.VERDICT_NAMES, 0), **counts},
        "postponed": 0,
        "misdated": 0,
        "lateness": {"p50": 0.1, "p99": 3.0, "worst": 4.0},
        "thresholds": held,
        "passed": all(each["passed"] for each in held.values()),
    }
    text = page({**found, "summary": summary})
    assert re.findall(r'class="verdict [\w-]+">(.*?)</span>', text) == badges
    assert f'<p class="lead">{" ".join(judgement)}</p>' in text
    for name, count in counts.items():
        assert f"<b>{count:,}</b><span>{name}</span>" in text


def test_what_waits_is_never_below_zero_whatever_is_not_known_of_its_publish(spark):
    def row(name, verdict, sent, arrived, due=10):
        at = [None if each is None else NOON + timedelta(seconds=each) for each in (sent, arrived)]
        late = None if arrived is None else float(arrived - due)
        times = (NOON + timedelta(seconds=due), at[0], 1, at[1], late)
        return (name, 0, "k", "t", "q", *times, 1, 1, None, 0, 0, verdict)

    rows = [
        row("sent nobody knows when", s.OK, None, 10),
        row("sent by a clock that is ahead", s.OK, 12, 10),
        row("cancelled", s.TAKEN_BACK, 2, None),
        row("refused", s.NOT_PUBLISHED, 2, None),
        row("ok", s.OK, 3, 12),
        row("sent nobody knows when, lost", s.LOST_IN_THE_LADDER, None, None),
    ]
    found = figures(spark.createDataFrame(rows, s.VERDICTS))
    # From 2 s on the cancelled one, until it is due; from 3 s on the last but one, until it comes.
    assert (found["start"], found["width"]) == (NOON.timestamp() + 2, 1)
    assert found["waiting"] == [1, *[2] * 7, 1, 1, 0]
    assert sum(found["due"]) == 5
    assert found["without_publish_time"] == 1
    assert {each["verdict"] for each in found["offenders"]} == {
        s.OK,
        s.NOT_PUBLISHED,
        s.LOST_IN_THE_LADDER,
    }
    text = page(found)
    assert "when they were published: 1." in text
    assert "<b>1</b><span>cancelled</span>" in text


def test_a_report_is_dark_where_its_reader_wants_that_and_not_in_print(whole):
    _, text = whole
    assert text.count("@media screen and (prefers-color-scheme:dark)") == 2
    # Colours stand in the style sheet alone, which has both.
    assert not re.search(r'(?:fill|stroke)="#', text)


@pytest.mark.slow
def test_the_page_prints_with_nothing_cut_off_however_long_the_names(whole, tmp_path):
    found, _ = copy.deepcopy(whole)
    for number, each in enumerate(found["offenders"]):
        each["task_id"] = f"6ba7b810-9dad-11d1-80b4-00c04fd430{number:02}"
        each["key"] = f"customer-{number:06}/" + "contract-2030-01-31/" * 4
        each["task"] = "company.shop.reminders.tasks.remind_customer_of_invoice"
        each["queue"] = "company.exchange/reminders.with.a.long.routing.key"
    (tmp_path / "report.html").write_text(page(found), encoding="utf-8")
    pages = printed(tmp_path / "report.html", tmp_path / "report.pdf")
    # A long name is broken into lines.
    text = re.sub(r"\s", "", "".join(pages)).replace("\ufffe", "-")
    wanted = re.findall(r"<h2>(.*?)</h2>|<th>(.*?)[<]", page(found))
    names = [name for pair in wanted for name in pair if name]
    names += [each[name] for each in found["offenders"] for name in ("task_id", "key", "queue")]
    assert len(names) > 80
    assert [name for name in names if re.sub(r"\s", "", name) not in text] == []
    assert len(pages) <= 8


def test_the_page_stays_small_however_many_tasks_there_are(spark, verdicts, whole):
    # The figures have a digit more, and are not more of them.
    few, many_more = (page(figures(each)) for each in (many(spark, 2000), verdicts))
    assert len(many_more) < 1.05 * len(few)
    found, text = whole
    assert len(text) < 500_000
    assert len(found["offenders"]) == OFFENDERS
    assert len(found["late"]) <= BINS + 1
    assert max(Counter(each["grouping"] for each in found["groups"]).values()) <= GROUPS
    over_time = [found["published"], found["waiting"], *found["seen"].values()]
    over_time += [each["waiting"] for each in found["planned"].values()]
    assert {len(each) for each in over_time} <= {*range(1, BINS + 2)}


def test_the_largest_groups_are_shown_of_each_kind_and_hours_in_their_order(spark):
    # More hours than a page has room for, and the last ones are the largest.
    tasks = spark.range(40 * 40).where("id % 40 >= id div 40").selectExpr("id % 40 as hour")
    due = F.timestamp_seconds(F.lit(NOON.timestamp()) + F.col("hour") * 3600)
    rows = many(spark, 1).drop("due").crossJoin(tasks.select(due.alias("due")))
    found = figures(rows.select(*many(spark, 1).columns).withColumn("lateness", F.lit(1.0)))
    sizes: dict[str, list[int]] = {name: [] for name in ("all", "hour", "queue", "task", "hops")}
    for each in found["groups"]:
        sizes[each["grouping"]].append(each["tasks"])
    all_of_them = [40 * 41 // 2]
    hours = [*range(40, 16, -1)]
    assert sizes == {**dict.fromkeys(sizes, all_of_them), "hour": hours}
    shown = re.findall(r"<td>(2030-\S+ \d\d:00)</td>", page(found))
    assert shown == sorted(shown)
    assert len(shown) == 24


def test_a_report_draws_what_is_due_at_the_end_of_time_or_nobody_knows_when(spark):
    far = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
    soon = NOON + timedelta(seconds=5)
    rows = [
        ("far", 0, "k", "t", "q", far, NOON, 15, None, None, 0, 0, None, 0, 0, s.STILL_WAITING),
        ("far, lost", 0, "k", "t", "q", far, NOON, 15, None, None, 0, 0, None, 0, 0, s.UNDECIDED),
        (
            None,
            0,
            None,
            None,
            None,
            None,
            None,
            None,
            None,
            None,
            0,
            0,
            None,
            0,
            0,
            s.NOT_PUBLISHED,
        ),
        ("ok", 0, "k", "t", "q", NOON, NOON, 1, soon, 5.0, 1, 1, "SUCCESS", 0, 0, s.OK),
    ]
    verdicts = spark.createDataFrame(rows, s.VERDICTS)
    found = figures(verdicts)
    assert sum(found["due"]) == 1
    assert [each["due"] for each in found["offenders"]] == [None, NOON.timestamp(), far.timestamp()]
    text = page(found)
    assert "9999-12-31 23:59:59" in text
    assert "1970" not in text
    assert "9999-12-31" in page(figures(verdicts.where("arrived_at is null")))


def test_one_task_that_was_due_decades_ago_does_not_flatten_the_charts(spark):
    past, soon = datetime(1970, 1, 1, tzinfo=UTC), NOON + timedelta(seconds=5)
    late = (soon - past).total_seconds()
    rows = [
        ("old", 0, "k", "t", "q", past, NOON, 0, soon, late, 1, 1, "SUCCESS", 0, 0, s.LATE),
        ("ok", 0, "k", "t", "q", NOON, NOON, 1, soon, 5.0, 1, 1, "SUCCESS", 0, 0, s.OK),
    ]
    found = figures(spark.createDataFrame(rows, s.VERDICTS))
    assert (found["start"], found["end"]) == (NOON.timestamp(), soon.timestamp())
    assert sum(found["arrived"]) == 2


def test_a_report_of_nothing_is_a_page_all_the_same(spark):
    text = page(figures(spark.createDataFrame([], s.VERDICTS)))
    assert "<b>0</b><span>ok</span>" in text
