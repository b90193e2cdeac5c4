"""The subcommands, as somebody at a terminal or a scheduler sees them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import amqp
import click
import pytest
from celery import Celery
from celery.bin.celery import celery as celery_command
from click.testing import CliRunner
from pyspark.errors import PySparkException

from kombu_binary_delay.cli import binary_delay
from kombu_binary_delay.cli.asked import Asked
from kombu_binary_delay.spark import columns, follow, journal
from kombu_binary_delay.spark import schema as s
from kombu_binary_delay.spark.cli.audit import _depths
from kombu_binary_delay.spark.cli.plan import _published
from kombu_binary_delay.spark.cli.publish import publish
from kombu_binary_delay.spark.columns import published_micros
from kombu_binary_delay.spark.follow import audit_due
from kombu_binary_delay.spark.journal import export_journal
from kombu_binary_delay.spark.report import plan_page

ROOT = Path(__file__).parents[2]
SOON = datetime.now(UTC) + timedelta(days=1)


@pytest.fixture
def tool(spark):
    def tool(*arguments):
        words = [*map(str, arguments)]
        return CliRunner().invoke(binary_delay, words if "spark" in words else ["spark", *words])

    return tool


@pytest.fixture
def reminders(spark, tmp_path):
    path = tmp_path / "reminders"
    rows = [(f"k{n}", "t", SOON) for n in range(30)]
    spark.createDataFrame(rows, "key string, task string, eta timestamp").write.parquet(str(path))
    return path


def test_a_plan_within_its_limits_exits_with_0_and_beyond_with_1(tool, reminders):
    assert tool("plan", reminders, "--limit", "waiting=30").exit_code == 0
    result = tool("plan", reminders, "--ladder", "125ms-4x15", "--limit", "waiting=29")
    assert result.exit_code == 1
    assert "125ms-4x15" in result.output


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("plan PATH --limit weight=1", "'weight' is unknown; known are waiting"),
        (
            "plan PATH --limit hops_per_second=0",
            "hops_per_second must be a finite number above 0, got 0.0; leave it out for no limit",
        ),
        ("plan PATH --limit waiting=inf", "waiting must be a finite number >= 0, got inf; leave"),
        ("plan PATH --limit waiting=nan", "waiting must be a finite number >= 0, got nan; leave"),
        ("plan PATH --ladder nope", "'nope'"),
        ("plan PATH --horizon 0", "horizon must be above 0, and"),
        (
            "publish PATH --job-id j --receipts r -b amqp:// --settings {",
            """settings must be a JSON object such as '{"radix": 4}', got '{'""",
        ),
        (
            "publish PATH --job-id j --receipts r -b amqp:// --settings [4]",
            "settings must be a JSO",
        ),
        ("publish PATH --job-id j --receipts r -b amqp:// --max-rate 0", "max_rate must be above"),
        ("audit --journal PATH --output o --late-after -1", "late_after must be a number"),
        ("audit-follow -b amqp:// --journal PATH --output o --allow x=1", "'x' is unknown"),
        ("audit --journal PATH --output o --allow lost=nan", "lost must be a finite number >= 0"),
        ("audit --journal PATH --output o --allow lost=inf", "lost must be a finite number >= 0"),
        ("audit --journal PATH --output o --job-id j", "give --receipts"),
        ("audit-follow -b amqp:// --journal PATH --output o --job-id j", "give --receipts"),
        ("audit --journal PATH --output s3://lake/audit", "'s3://lake/audit' is not on this"),
        ("audit --journal PATH --output o --depths PATH", "beside those of a plan: give --plan"),
        ("report PATH --output o --depths PATH", "beside those of a plan: give --plan"),
        ("report PATH --output hdfs:/report.html", "'hdfs:/report.html' is not on this"),
        ("-A shop spark publish PATH --job-id j --receipts r", "name it after 'publish', with"),
        *(
            (f"-A shop spark {each}", "the app is named before 'spark', where it does not count")
            for each in ("journal-export --output j", "plan PATH", "report PATH --output o")
        ),
        ("journal-export -b amqp://shop:hunter2/x@rabbit// --output j", "percent-encoded"),
        ("audit --journal amqp://shop:hunter2/x@b// --output o", "percent-encoded"),
        ("--tick 250 spark publish PATH --job-id j --receipts r --app a:a", "tick is given before"),
        ("--tick x spark plan PATH", "'x' is not a whole number"),
    ],
)
def test_what_cannot_be_is_an_error_of_usage_and_nothing_is_written(
    tool, reminders, tmp_path, monkeypatch, given, words
):
    monkeypatch.chdir(tmp_path)
    result = tool(*(reminders if each == "PATH" else each for each in given.split()))
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.output.split())
    assert "hunter" not in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["reminders"]


def test_only_an_app_that_is_named_for_celery_is_one_before_spark(spark, reminders, monkeypatch):
    app = Celery("shop", set_as_current=False)
    for where in ("celery.bin.celery", "celery.app.utils"):
        monkeypatch.setattr(f"{where}.find_app", lambda *_, **__: app)
    monkeypatch.setitem(celery_command.commands, "binary-delay", binary_delay)
    plan = ["binary-delay", "spark", "plan", str(reminders)]
    named = CliRunner().invoke(celery_command, ["-A", "shop", *plan])
    unnamed = CliRunner().invoke(celery_command, plan)

    assert (named.exit_code, unnamed.exit_code) == (2, 0), unnamed.output
    assert "the app is named before 'spark'" in " ".join(named.output.split())


def test_settings_may_stand_before_spark(tool, spark, reminders, vhost, gone, tmp_path):
    planned = tool("--radix", "2", "spark", "plan", reminders)
    assert "125ms-2x31" in planned.output

    given = ["--job-id", "j", "--receipts", tmp_path / "r", "--settings", '{"radix": 4}']
    done = tool("-b", vhost.url, "--namespace", "shop", "spark", "publish", reminders, *given)
    assert done.exit_code == 0, done.output
    names = {each["name"] for each in vhost.queues() if "125ms" in each["name"]}
    assert {name.partition(".")[0] for name in names} == {"shop"}
    assert all("-4x" in name for name in names)

    audit = "audit", "--journal", gone, "--output", tmp_path / "o"
    for words in (
        ("--namespace", "shop", "spark", *audit),
        ("spark", *audit, "--namespace", "shop"),
    ):
        assert "0 tasks are judged" in tool(*words).output


@pytest.mark.parametrize(
    ("before", "variable", "after", "taken"),
    [
        (Asked(broker="amqps://before//?ssl_ca_certs=/ca.pem"), "amqp://variable", "", "before"),
        (Asked(broker="amqp://before"), "amqp://variable", "-b amqp://after", "after"),
        (Asked(), "", "", None),
    ],
)
@pytest.mark.parametrize("app", ["", "--app shop:app"])
def test_the_broker_after_spark_counts_then_that_before_and_then_the_variable_and_the_apps_last(
    monkeypatch, before, variable, after, taken, app
):
    monkeypatch.setenv("BINARY_DELAY_BROKER", variable)
    given = f"PATH --job-id j --receipts r {after} {app}".split()
    with click.Context(binary_delay, obj=before) as parent:
        broker = publish.make_context("publish", given, parent=parent).params["broker"]
    urls = [getattr(before, "broker", None), variable, "amqp://after"]
    assert (broker or None) == next((url for url in urls if taken and taken in (url or "")), None)


def test_the_file_for_spark_submit_takes_the_settings_from_the_environment_too(tmp_path):
    env = {**os.environ, "BINARY_DELAY_TICK": "x", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "kombu_binary_delay.spark", "plan", str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "'x' is not a whole number, as BINARY_DELAY_TICK says" in " ".join(done.stderr.split())


def test_a_plan_that_compares_ladders_is_not_drawn_as_one(tool, gone, reminders, tmp_path):
    tool("plan", reminders, "--horizon", "600", "--output", tmp_path / "plan")
    given = ["--journal", gone, "--output", tmp_path / "o", "--plan", tmp_path / "plan"]

    refused = tool("audit", *given)

    assert refused.exit_code == 2
    assert "compares 125ms-" in refused.output
    assert not (tmp_path / "o").exists()


def test_depths_of_queues_that_no_plan_has_are_refused_before_anything_is_judged(
    tool, spark, reminders, tmp_path
):
    planned, journal, output = (tmp_path / name for name in ("plan", "journal", "o"))
    tool("plan", reminders, "--output", planned)
    spark.createDataFrame([], s.JOURNAL).write.parquet(str(journal))
    rows = spark.read.parquet(str(planned)).where("queue is not null")
    seen = rows.selectExpr("minute AS at", "replace(queue, 'kbd', 'shop') AS queue", "waiting")
    seen.write.option("header", "true").csv(str(tmp_path / "depths"))
    place = f"csv:{tmp_path}/depths"
    given = ["--output", output, "--plan", planned, "--depths", place]

    refused = tool("audit", "--journal", journal, *given)

    assert refused.exit_code == 2, refused.output
    text = " ".join(refused.output.split())
    assert "no queue of the depths is in the plan: they have such as 'shop.v2-" in text
    assert "and the plan 'kbd.v2-" in text
    assert not output.exists()
    read = _depths(spark, place, None)
    assert read is not None
    assert sorted(read.collect()) == sorted(seen.collect())


def test_a_countdown_begins_at_one_time_in_the_plan_and_in_its_report(
    tool, spark, tmp_path, monkeypatch
):
    path, found = str(tmp_path / "rows"), dict[str, Any]()
    spark.range(30).selectExpr("600.0D countdown").write.parquet(path)
    # The report is drawn much later.
    clock = count(time.time_ns(), 3_600 * 10**9)
    monkeypatch.setattr(columns, "time", SimpleNamespace(time_ns=lambda: next(clock)))
    monkeypatch.setattr(plan_page, "plan_page", lambda given: found.update(given) or "")
    result = tool("plan", path, "--report", tmp_path / "plan.html")
    assert result.exit_code == 0, result.output
    assert {name: sum(each) for name, each in found["due"].items()} == {"the task's own": 30}


@pytest.mark.parametrize(
    ("columns", "names"),
    [
        ("1 id", ["id", "published"]),
        ("null Published", ["Published"]),
        ("cast(null as string) Published", ["Published"]),
        ("cast(null as timestamp) Published", ["Published"]),
    ],
)
def test_the_time_of_the_publish_is_filled_in_under_its_own_name(spark, columns, names):
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        rows = _published(spark.sql(f"select {columns}"))
        [[micros]] = rows.select(published_micros(rows)).collect()
    finally:
        spark.conf.unset("spark.sql.caseSensitive")
    assert rows.columns == names
    assert 0 < time.time() - micros / 1_000_000 < 600


def test_publish_and_audit_tell_what_they_did(tool, spark, reminders, vhost, tmp_path):
    receipts, output = tmp_path / "receipts", tmp_path / "audit"
    job = ["--job-id", "j", "--receipts", receipts, "--broker", vhost.url]
    settings = ["--settings", '{"journal": "stream"}']
    result = tool("publish", reminders, *job, *settings)
    assert result.exit_code == 0, result.output
    assert "30 published" in result.output
    given = ["--receipts", receipts, "--journal", vhost.url, "--output", output.as_uri()]
    result = tool("audit", *given, "--allow", "p99=7.5")
    assert result.exit_code == 0, result.output
    assert json.loads((output / "summary.json").read_text())["verdicts"][s.STILL_WAITING] == 30
    text = (output / "report.html").read_text()
    assert text.startswith("<!doctype html>")
    assert "<h1>Delayed tasks of j</h1>" in text
    assert "7.5 s" in text
    again = tmp_path / "again.html"
    assert tool("report", output, "--output", again).exit_code == 0
    assert again.read_text() == text
    summary = output / "summary.json"
    summary.write_text(summary.read_text()[:-9])
    refused = tool("report", output, "--output", again)
    assert refused.exit_code == 2
    assert f"{summary} is not the summary of an audit" in " ".join(refused.output.split())


def test_a_loss_makes_the_audit_exit_with_1(tool, spark, tmp_path, monkeypatch):
    past = datetime.now(UTC) - timedelta(days=1)
    lost = ("j", "k", "i", "t", "q", past, past, 1, 0, 0, s.PUBLISHED, None, s.PUBLISH)
    event = (s.SCHEDULED, "i", 0, "t", "q", past, past, "l", 1, None, 0)
    receipts, journal, output = (str(tmp_path / name) for name in ("r", "j", "o"))
    spark.createDataFrame([lost], s.RECEIPTS).write.parquet(receipts)
    spark.createDataFrame([event], s.JOURNAL).write.parquet(journal)
    given = ["--receipts", receipts, "--journal", journal, "--output", output, "--complete"]
    assert tool("audit", *given).exit_code == 1
    assert tool("audit", *given, "--allow", "lost=1").exit_code == 0

    def ends(*_, **__):
        raise RuntimeError("it ends half-way")

    # While the verdicts are those of the audit before, so is the summary, and no longer.
    summary = Path(output, "summary.json")
    with monkeypatch.context() as patch:
        patch.setattr("kombu_binary_delay.spark.tables.overwrite", ends)
        assert "it ends half-way" in tool("audit", *given).output
    assert summary.exists()
    monkeypatch.setattr("kombu_binary_delay.spark.report.figures.figures", ends)
    assert "it ends half-way" in tool("audit", *given).output
    assert not summary.exists()


def test_complete_is_refused_for_a_journal_that_says_until_when_it_is(tool, spark, tmp_path):
    mark = (s.COMPLETE, None, None, None, None, SOON, None, None, None, None, None)
    journal, output = tmp_path / "journal", tmp_path / "o"
    spark.createDataFrame([mark], s.JOURNAL).write.parquet(str(journal))
    refused = tool("audit", "--journal", journal, "--output", output, "--complete")
    assert refused.exit_code == 2, refused.output
    assert "leave --complete out" in " ".join(refused.output.split())
    assert not output.exists()


def test_a_row_that_is_rejected_makes_the_publish_exit_with_1(tool, spark, vhost, tmp_path):
    path = str(tmp_path / "rows")
    rows = [("a", "t", SOON), ("b", None, SOON)]
    spark.createDataFrame(rows, "key string, task string, eta timestamp").write.parquet(path)
    job = ["--job-id", "j", "--receipts", tmp_path / "receipts", "--broker", vhost.url]
    result = tool("publish", path, *job)
    assert "1 published" in result.output
    assert "1 rejected" in result.output
    # It says what it does, from the start.
    starts = [line.partition(":")[0] for line in result.stderr.splitlines()]
    assert list(dict.fromkeys(starts)) == ["preparing the rows", "publishing"]
    assert result.exit_code == 1


def test_an_audit_of_one_job_judges_its_tasks_by_the_whole_journal(tool, spark, tmp_path):
    past = datetime.now(UTC) - timedelta(days=1)
    rows = [
        (f"job-{n}", "k", f"i{n}", "t", "q", past, past, 1, 0, 0, s.PUBLISHED, None, s.PUBLISH)
        for n in (1, 2)
    ]
    later = past + timedelta(hours=1)
    events = [(s.SCHEDULED, f"i{n}", 0, "t", "q", past, past, "l", 1, None, n) for n in (1, 2, 3)]
    events.append((s.RELEASED, "i2", 0, "t", "q", later, later, "l", 1, None, 4))
    receipts, journal, output = (str(tmp_path / name) for name in ("r", "j", "o"))
    spark.createDataFrame(rows, s.RECEIPTS).write.parquet(receipts)
    spark.createDataFrame(events, s.JOURNAL).write.parquet(journal)
    given = ["--receipts", receipts, "--journal", journal, "--output", output]
    assert tool("audit", *given, "--job-id", "job-1").exit_code == 1
    found = spark.read.schema(s.VERDICTS).parquet(f"{output}/verdicts").collect()
    assert {row.task_id: row.verdict for row in found} == {"i1": s.LOST_IN_THE_LADDER}
    # A mistyped job.
    result = tool("audit", *given, "--job-id", "job-3")
    assert result.exit_code == 1
    assert "0 tasks are judged, and 1 must be" in " ".join(result.output.split())
    assert tool("audit", *given, "--job-id", "job-3", "--allow", "judged=0").exit_code == 0


@pytest.fixture
def gone(vhost):
    """A stream with one event: a task that was due ten seconds ago, of which nothing else says."""
    past = datetime.now(UTC) - timedelta(seconds=10)
    micros = int(past.timestamp() * 1_000_000)
    event = {"event": s.SCHEDULED, "id": "i", "task": "t", "at": micros, "due": micros, "hops": 1}
    with vhost.connect() as connection:
        channel = connection.channel()
        kind = {"x-queue-type": "stream"}
        stream = {"durable": True, "auto_delete": False, "arguments": kind}
        channel.queue_declare("kbd.v2.journal", **stream)
        channel.confirm_select()
        channel.basic_publish_confirm(amqp.Message(json.dumps(event)), "", "kbd.v2.journal")
    return vhost.url


def test_what_a_broker_has_is_complete_until_now(tool, spark, gone, tmp_path):
    # Nothing has been written since: a journal of files would have to be said to be complete.
    given = ["--journal", gone, "--output", tmp_path / "o", "--patience", "5"]
    assert tool("audit", *given).exit_code == 1
    summary = json.loads((tmp_path / "o" / "summary.json").read_text())
    assert summary["verdicts"][s.LOST_IN_THE_LADDER] == 1


@pytest.mark.slow
def test_an_audit_goes_on_until_it_is_stopped_and_from_there_again(
    tool, spark, gone, tmp_path, monkeypatch
):
    output = tmp_path / "o"
    given = ["-b", gone, "--journal", tmp_path / "journal", "--output", output, "--patience", "5"]
    calls: list[None] = []

    def second_is_stopped(*tables, **more):
        calls.append(None)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGTERM)
        return audit_due(*tables, **more)

    exports: list[None] = []

    def second_finds_no_broker(*given, **more):
        exports.append(None)
        if len(exports) == 2:
            raise PySparkException("ConnectionRefusedError: [Errno 111] Connection refused\n")
        export_journal(*given, **more)

    monkeypatch.setattr(follow, "audit_due", second_is_stopped)
    monkeypatch.setattr(journal, "export_journal", second_finds_no_broker)
    handler = signal.getsignal(signal.SIGTERM)
    result = tool("audit-follow", *given, "--every", "0")
    assert (len(calls), len(exports), result.exit_code) == (2, 3, 1), result.output
    assert "the journal is read again in 0 s: ConnectionRefusedError: [Errno" in result.stderr
    assert signal.getsignal(signal.SIGTERM) is handler
    assert f"  {s.LOST_IN_THE_LADDER}: i (key None, queue )" in result.output
    assert result.output.count("1 judged (1 lost in the ladder), 0 corrected") == 1
    # Without a step before, it may be the wrong broker.
    exports[:] = [None]
    result = tool("audit-follow", *given)
    assert (len(calls), result.exit_code) == (2, 4), result.output
    result = tool("audit-follow", *given, "--once", "--allow", "lost=1")
    assert (len(calls), result.exit_code) == (3, 0), result.output
    assert "judged" not in result.output
    assert f"1  {s.LOST_IN_THE_LADDER}" in result.output
    assert tool("report", output, "--output", tmp_path / "report.html").exit_code == 0
    assert s.LOST_IN_THE_LADDER in (tmp_path / "report.html").read_text()
    # Of another job, there is nothing to judge.
    past = datetime.now(UTC) - timedelta(seconds=10)
    row = ("j", "k", "i", "t", "q", past, past, 1, 0, 0, s.PUBLISHED, None, s.PUBLISH)
    spark.createDataFrame([row], s.RECEIPTS).write.parquet(str(tmp_path / "receipts"))
    given[-3] = tmp_path / "of another job"
    given += ["--receipts", tmp_path / "receipts", "--job-id", "another", "--once"]
    result = tool("audit-follow", *given)
    assert (len(calls), result.exit_code) == (4, 0), result.output
    assert "judged" not in result.output


def test_neither_the_package_nor_the_tool_imports_spark_or_rich():
    code = (
        "import sys, kombu_binary_delay, kombu_binary_delay.cli;"
        "extras = ('pyspark', 'pyarrow', 'numpy', 'rich');"
        "print([name for name in sys.modules if name.startswith(extras)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.own_broker
@pytest.mark.slow
def test_the_pipeline_proves_itself_though_an_executor_is_killed():
    env = {**os.environ, "REMINDERS": "3000"}
    done = subprocess.run(
        [sys.executable, "-m", "dev.pipeline"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "an executor was killed on the way" in done.stdout
    assert "nothing lost, nothing early" in done.stdout


@pytest.mark.slow
def test_a_standalone_cluster_publishes_through_spark_submit(spark, reminders, vhost, tmp_path):
    import pyspark  # noqa: PLC0415 - for where it is

    from dev.processes import Processes  # noqa: PLC0415
    from dev.service import START, free_ports  # noqa: PLC0415

    home = Path(pyspark.__file__).parent
    env = {
        **os.environ,
        "SPARK_HOME": str(home),
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_WORKER_DIR": str(tmp_path / "work"),
    }
    port, master_ui, worker_ui = free_ports(3)
    master = f"spark://127.0.0.1:{port}"
    launch, log = str(home / "bin" / "spark-class"), tmp_path / "cluster.log"
    deploy = "org.apache.spark.deploy"
    with Processes("cluster") as processes:
        where = ["--host", "127.0.0.1", "--port", str(port), "--webui-port", str(master_ui)]
        processes.spawn([launch, f"{deploy}.master.Master", *where], env, log)
        given = ["-h", "127.0.0.1", "-c", "2", "-m", "1g", "--webui-port", str(worker_ui), master]
        processes.spawn([launch, f"{deploy}.worker.Worker", *given], env, log)
        deadline = time.monotonic() + START
        while "Successfully registered with master" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        receipts = str(tmp_path / "receipts")
        submit = [
            str(home / "bin" / "spark-submit"),
            *("--master", master, "--executor-memory", "512m"),
            *("--conf", "spark.speculation=false", "--conf", "spark.ui.enabled=false"),
            str(ROOT / "kombu_binary_delay" / "spark" / "__main__.py"),
            *("publish", str(reminders), "--job-id", "j", "--receipts", receipts),
        ]
        env |= {"BINARY_DELAY_BROKER": vhost.url, "BINARY_DELAY_NAMESPACE": "shop"}
        done = subprocess.run(submit, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "30 published" in done.stdout
    rows = spark.read.schema(s.RECEIPTS).parquet(receipts).collect()
    assert {row.status for row in rows} == {s.PUBLISHED}
    assert len(rows) == 30
    assert any(each["name"].startswith("shop.") for each in vhost.queues())
