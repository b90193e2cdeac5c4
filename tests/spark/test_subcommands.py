"""The subcommands, as somebody at a terminal or a scheduler sees them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import amqp
import click
import pytest
from celery import Celery
from celery.bin.celery import celery as celery_command
from click.testing import CliRunner

from kombu_binary_delay.cli import binary_delay
from kombu_binary_delay.cli.asked import Asked
from kombu_binary_delay.spark import journal
from kombu_binary_delay.spark import schema as s
from kombu_binary_delay.spark.cli.jobs import publish
from kombu_binary_delay.spark.cli.shared import first_line
from kombu_binary_delay.spark.journal import export_journal
from kombu_binary_delay.spark.tables import append

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SOON = datetime.now(UTC) + timedelta(days=1)


@pytest.fixture
def tool(spark):
    def tool(*arguments):
        words = [*map(str, arguments)]
        return CliRunner().invoke(binary_delay, words if "spark" in words else ["spark", *words])

    return tool


@pytest.fixture(scope="module")
def reminders(spark, tmp_path_factory):
    path = tmp_path_factory.mktemp("tables") / "reminders"
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
        ("plan PATH --limit waiting=inf", "waiting must be a finite number >= 0, got inf; leave"),
        ("plan PATH --limit waiting=nan", "waiting must be a finite number >= 0, got nan; leave"),
        ("plan PATH --ladder nope", "'nope'"),
        ("plan PATH --horizon 0", "horizon must be above 0, and"),
        ("plan PATH --column due=eta", "'due' is no column of a row; known are key, task, eta"),
        ("plan PATH --column eta=next", "there is no column 'next' for eta"),
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
        ("report PATH --output hdfs:/report.html", "'hdfs:/report.html' is not on this"),
        ("-A shop spark publish PATH --job-id j --receipts r", "name it after 'publish', with"),
        *(
            (f"-A shop spark {options}", "the app is named before 'spark', where it does not count")
            for options in ("journal-export --output j", "plan PATH", "report PATH --output o")
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
    result = tool(*(reminders if word == "PATH" else word for word in given.split()))
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.output.split())
    assert "hunter" not in result.output
    assert not list(tmp_path.iterdir())


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
    names = {queue["name"] for queue in vhost.queues() if "125ms" in queue["name"]}
    assert {name.partition(".")[0] for name in names} == {"shop"}
    assert all("-4x" in name for name in names)

    words = "spark", "audit", "--journal", gone, "--output", tmp_path / "o"
    assert "0 tasks are judged" in tool("--namespace", "shop", *words).output


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


def test_publish_and_audit_tell_what_they_did(tool, spark, reminders, vhost, tmp_path):
    receipts, output = tmp_path / "receipts", tmp_path / "audit"
    job = ["--job-id", "j", "--receipts", receipts, "--broker", vhost.url]
    settings = ["--settings", '{"journal": "stream", "radix": 2}']
    would = tool("publish", reminders, *job, *settings, "--dry-run")
    assert "would publish 30, 0 rejected" in would.output
    result = tool("publish", reminders, *job, *settings)
    assert result.exit_code == 0, result.output
    assert "columns used: key, task, eta" in result.output
    assert "30 published" in result.output
    given = ["--receipts", receipts, "--journal", vhost.url, "--output", output.as_uri()]
    result = tool("audit", *given, "--allow", "p99=7.5")
    # Nothing is proven yet.
    assert result.exit_code == 3, result.output
    assert "not judged yet" in result.output
    summary = json.loads((output / "summary.json").read_text())
    assert summary["verdicts"][s.STILL_WAITING] == 30
    assert summary["outcome"] == "not judged yet"
    text = (output / "report.html").read_text()
    assert text.startswith("<!doctype html>")
    assert "<h1>Delayed tasks of j</h1>" in text
    assert "7.5 s" in text
    again = tmp_path / "again.html"
    assert tool("report", output, "--output", again).exit_code == 0
    assert again.read_text().strip() == text.strip()


def test_a_loss_makes_the_audit_exit_with_1(tool, spark, tmp_path):
    past = datetime.now(UTC) - timedelta(days=1)
    lost = ("j", "k", "i", "t", "q", past, past, 1, 0, 0, s.PUBLISHED, None, s.PUBLISH)
    event = (s.SCHEDULED, "i", 0, "t", "q", past, past, "l", 1, None, 0)
    receipts, journal, output = (str(tmp_path / name) for name in ("r", "j", "o"))
    append(spark.createDataFrame([lost], s.RECEIPTS), receipts)
    append(spark.createDataFrame([event], s.JOURNAL), journal)
    given = ["--receipts", receipts, "--journal", journal, "--output", output, "--complete"]
    assert tool("audit", *given).exit_code == 1
    allowed = tool("audit", *given, "--allow", "lost=1")
    assert allowed.exit_code == 0
    assert "'ran_after_cancel=x' must" not in allowed.output


def test_complete_is_refused_for_a_journal_that_says_until_when_it_is(tool, spark, tmp_path):
    mark = (s.COMPLETE, None, None, None, None, SOON, None, None, None, None, None)
    journal, output = tmp_path / "journal", tmp_path / "o"
    spark.createDataFrame([mark], s.JOURNAL).write.parquet(str(journal))
    refused = tool("audit", "--journal", journal, "--output", output, "--complete")
    assert refused.exit_code == 2, refused.output
    assert "leave --complete out" in " ".join(refused.output.split())
    assert not output.exists()


def test_rejected_rows_are_said_with_reason_and_place_and_make_the_publish_exit_with_1(
    tool, spark, vhost, tmp_path
):
    path, receipts = str(tmp_path / "rows"), tmp_path / "receipts"
    rows = [("a", "t", SOON, "q"), ("b", None, SOON, "q"), ("c", " ", SOON, "q")]
    names = "customer string, task string, next_contact timestamp, que string"
    spark.createDataFrame(rows, names).write.parquet(path)
    job = ["--job-id", "j", "--receipts", receipts, "--broker", vhost.url]
    job += ["--column", "key=customer", "--column", "eta=next_contact"]
    job += ["--settings", '{"radix": 2}']
    would = tool("publish", path, *job, "--dry-run")
    assert "would publish 1, 2 rejected" in would.output
    assert "2 rows are rejected:" in would.output
    result = tool("publish", path, *job)
    assert result.exit_code == 1
    assert "columns used: customer as key, task, next_contact as eta; ignored: que" in result.output
    assert "is que queue?" in result.output
    assert "1 published" in result.output
    assert f"2 rows are rejected, see {receipts}-rejects:" in result.output
    assert f"{2:>12}  no task is named" in result.output


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
    verdicts = spark.read.schema(s.VERDICTS).parquet(f"{output}/verdicts").collect()
    assert {row.task_id: row.verdict for row in verdicts} == {"i1": s.LOST_IN_THE_LADDER}
    # A mistyped job.
    result = tool("audit", *given, "--job-id", "job-3")
    assert result.exit_code == 1
    assert "0 tasks are judged, and 1 must be" in " ".join(result.output.split())


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


def test_an_audit_goes_on_though_the_broker_is_away_and_once_exits_by_its_verdicts(
    tool, spark, gone, tmp_path, monkeypatch
):
    output = tmp_path / "o"
    given = ["-b", gone, "--journal", tmp_path / "journal", "--output", output, "--patience", "5"]
    exports: list[None] = []

    def second_finds_no_broker(*given, **more):
        exports.append(None)
        if len(exports) == 2:
            raise ConnectionRefusedError("Connection refused")
        if len(exports) == 3:
            raise KeyboardInterrupt
        export_journal(*given, **more)

    monkeypatch.setattr(journal, "export_journal", second_finds_no_broker)
    result = tool("audit-follow", *given, "--every", "0")
    assert len(exports) == 3, result.output
    assert "tried again in 0 s: Connection refused" in result.stderr
    assert f"1 {s.LOST_IN_THE_LADDER}" in result.output
    # Without a step before, it may be the wrong broker.
    exports[:] = [None]
    assert tool("audit-follow", *given).exit_code == 4
    exports.append(None)
    result = tool("audit-follow", *given, "--once")
    assert result.exit_code == 1, result.output
    assert f"1  {s.LOST_IN_THE_LADDER}" in result.output
    assert tool("audit-follow", *given, "--once", "--allow", "lost=1").exit_code == 0
    assert tool("report", output, "--output", tmp_path / "report.html").exit_code == 0
    assert s.LOST_IN_THE_LADDER in (tmp_path / "report.html").read_text()


def test_a_broker_that_does_not_answer_is_exit_code_4_before_spark_starts(
    tool, reminders, tmp_path, monkeypatch
):
    monkeypatch.delenv("PYSPARK_SUBMIT_ARGS", raising=False)
    result = tool("journal-export", "-b", "amqp://127.0.0.1:1", "--output", tmp_path / "j")
    assert result.exit_code == 4
    assert "no RabbitMQ answers" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[PATH_NOT_FOUND] There is no a. SQLSTATE: 42K03", "[PATH_NOT_FOUND] There is no a."),
        (
            "An error occurred while calling o1.save.\n: IOException: full\n\tat x",
            "IOException: full",
        ),
        ("Traceback (most recent call last):\n  File 'x'\nValueError: bad\n\tat x", "bad"),
    ],
)
def test_an_error_of_spark_is_one_line(text, line):
    assert first_line(RuntimeError(text)).startswith(line)


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
    assert any(queue["name"].startswith("shop.") for queue in vhost.queues())
