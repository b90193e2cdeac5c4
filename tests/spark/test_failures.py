"""What goes wrong around Spark is one sentence that names the value and the remedy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from py4j.clientserver import ClientServerConnection, JavaParameters, PythonParameters
from py4j.java_gateway import GatewayProperty
from pyspark.errors import PySparkException

from dev.service import free_ports
from kombu_binary_delay.cli import binary_delay
from kombu_binary_delay.spark.classic import folders
from kombu_binary_delay.spark.cli.failures import explained, outage
from kombu_binary_delay.spark.cli.shared import spark_session

ROOT = Path(__file__).parents[2]
USAGE, UNREACHABLE = 2, 4
JOB = "--job-id j --receipts {tmp}/receipts"


@pytest.fixture(scope="module")
def place(spark, tmp_path_factory):
    """A folder with rows, with what is none, and with programs that are not what they should be."""
    folder = tmp_path_factory.mktemp("place")
    rows = [("k", "t", datetime.now(UTC) + timedelta(hours=1))]
    columns = "key string, task string, eta timestamp"
    spark.createDataFrame(rows, columns).write.parquet(str(folder / "rows"))
    (folder / "empty").mkdir()
    (folder / "text.parquet").write_text("text")
    (folder / "mixed").mkdir()
    for name, header in {"a": "countdown,task", "b": "task,countdown"}.items():
        (folder / "mixed" / f"{name}.csv").write_text(f"{header}\n1,1\n")
    (folder / "cut.csv").write_text("task_id,verdict\ni\n")
    (folder / "cut.json").write_text('{"task_id": "i"}\n{"task_id": "j')
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "shop_elsewhere.py").write_text("import celery; app = celery.Celery()")
    scripts = {
        "java/bin/java": "echo UnsupportedClassVersionError >&2; exit 1",
        "python": "echo 2.7; exit 0",
    }
    for name, lines in scripts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"#!/bin/sh\n{lines}\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("given", "env", "code", "sentence"),
    [
        # Before Spark starts.
        ("plan {tmp}/nowhere", {}, USAGE, "there is nothing at {tmp}/nowhere: name a path"),
        (
            "plan {tmp}/rows --output {tmp}/text.parquet/x",
            {},
            USAGE,
            "{tmp}/text.parquet is no folder: name a path where it can",
        ),
        (
            f"publish {{tmp}}/rows {JOB} -b amqp://127.0.0.1:{{port}}//",
            {},
            UNREACHABLE,
            (
                "no RabbitMQ answers at 127.0.0.1:{port} (virtual host /, user guest): Connection "
                "refused; change --broker"
            ),
        ),
        (
            "audit --journal amqp://127.0.0.1:{port}// --output {tmp}/audit",
            {},
            UNREACHABLE,
            "no RabbitMQ answers at 127.0.0.1:{port}",
        ),
        (
            f"publish {{tmp}}/rows {JOB} -b {{user}}",
            {},
            UNREACHABLE,
            "refuses the user 'nobody' or its password; change --broker",
        ),
        (
            "journal-export --output {tmp}/journal -b {vhost}-none",
            {},
            UNREACHABLE,
            "-none'; make it with 'rabbitmqctl add_vhost ",
        ),
        ("plan {tmp}/rows", {"JAVA_HOME": "{tmp}/none"}, USAGE, "no Java at JAVA_HOME, {tmp}/none"),
        ("plan {tmp}/rows", {"JAVA_HOME": None, "PATH": "{tmp}"}, USAGE, "no Java in PATH, and"),
        (
            "plan {tmp}/rows",
            {"PYSPARK_PYTHON": "{tmp}/none"},
            USAGE,
            "Spark's workers cannot start the Python '{tmp}/none': set PYSPARK_PYTHON,",
        ),
        (
            "plan {tmp}/rows",
            {"PYSPARK_PYTHON": "{tmp}/python"},
            USAGE,
            "Spark's workers run Python 2.7 (PYSPARK_PYTHON is {tmp}/python), and this is Python 3",
        ),
        (
            f"publish {{tmp}}/rows {JOB} -b {{vhost}} --app shop_elsewhere:app",
            {},
            USAGE,
            "Spark's workers cannot import 'shop_elsewhere': install it in the Python of Spark's",
        ),
        (
            f"publish {{tmp}}/rows {JOB} --app nowhere.app:app",
            {},
            USAGE,
            "this Python has no module 'nowhere': install it,",
        ),
        # From Spark: with a configuration of its own, it may see paths that this machine does not.
        (
            "plan {tmp}/nowhere",
            {"SPARK_CONF_DIR": "{tmp}"},
            USAGE,
            "there is nothing at {tmp}/nowhere: name a path that Spark sees",
        ),
        (
            "plan {tmp}/text.parquet",
            {},
            USAGE,
            "{tmp}/text.parquet cannot be read as Parquet:",
        ),
        ("plan csv:{tmp}/mixed", {}, USAGE, "does not have the header line of the other files"),
        (
            "report csv:{tmp}/cut.csv --output {tmp}/report.html",
            {},
            USAGE,
            "a row has more or fewer cells than the header line of its file, or is not JSON, [",
        ),
        (
            "report json:{tmp}/cut.json --output {tmp}/report.html",
            {},
            USAGE,
            "or is not JSON, [",
        ),
        ("plan {tmp}/empty", {}, USAGE, "no files of the format Parquet at {tmp}/empty: name the"),
        (
            "audit --receipts {tmp}/rows --journal {vhost} --output {tmp}/o --plan {tmp}/empty",
            {},
            USAGE,
            "no files of the format Parquet at {tmp}/rows or {tmp}/empty: name the path",
        ),
        ("plan {tmp}/rows --output /proc/none", {}, USAGE, "Spark cannot write /proc/none-staged-"),
        (
            f"publish {{tmp}}/rows {JOB} -b {{vhost}} --key customer",
            {},
            USAGE,
            "a column 'customer' is needed, got ['key', 'task', 'eta']",
        ),
    ],
)
def test_an_error_is_one_sentence_and_the_exit_code_of_its_kind(
    place, vhost, monkeypatch, given, env, code, sentence
):
    (port,) = free_ports(1)
    scheme, _, rest = vhost.url.partition("://")
    user = f"{scheme}://nobody:wrong@{rest.partition('@')[2]}"
    words = {"tmp": place, "port": port, "vhost": vhost.url, "user": user}
    for name, value in env.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value.format_map(words))
    if "elsewhere" in given:
        monkeypatch.syspath_prepend(str(place / "elsewhere"))
    arguments = given.format_map(words).split()
    done = CliRunner().invoke(binary_delay, ["spark", *arguments])
    assert done.exit_code == code, done.output
    # A slow machine shows how far Spark is.
    said = [
        line
        for line in done.stderr.strip().splitlines()
        if not re.match(r"starting Spark|[a-z ]+: [0-9:]{5,}", line)
    ]
    assert sentence.format_map(words) in said[-1]
    assert len(said) == (1 if "--key" not in given else 4)
    assert "Traceback" not in done.output


WORKER = "An exception was thrown from the Python worker:\nTraceback (most recent call last):\n"
FORCED = f"{WORKER}amqp.exceptions.ConnectionForced: (0, 0): (320) CONNECTION_FORCED - it stops\n"
REFUSED = f"{WORKER}amqp.exceptions.AccessRefused: (0, 0): (403) ACCESS_REFUSED - Login was ref\n"
AGAIN = "During handling of the above exception, another exception occurred:"
UNCONFIRMED = "not all confirms came within 60 s"
DIFFERENT = "[PYTHON_VERSION_MISMATCH] Python in worker has different version"


@pytest.mark.parametrize(
    ("text", "code", "sentence"),
    [
        # Of PySpark 4 and 3.5.
        (
            f"{WORKER}E: {DIFFERENT}: 3.10 than that in driver: 3.11, PySpark cannot run with",
            USAGE,
            "Spark's workers run Python 3.10",
        ),
        (
            f"{WORKER}E: {DIFFERENT} 3.10 than that in driver 3.11, PySpark cannot run with",
            USAGE,
            "and this is Python 3.11: set PYSPARK_PYTHON",
        ),
        (
            'java.io.IOException: Cannot run program "/x/python": error=2, No such file',
            USAGE,
            "cannot start the Python '/x/python'",
        ),
        (
            f"{WORKER}RuntimeError: the stream s begins at 9 now; do this\n\tat java",
            USAGE,
            "the stream s begins at 9 now; do this",
        ),
        (
            f"{WORKER}RuntimeError: the stream s cannot be read now, as its node starts\n\tat",
            UNREACHABLE,
            "the stream s cannot be read now, as its node starts",
        ),
        (f"{WORKER}ModuleNotFoundError: No module named 'shop'", USAGE, "cannot import 'shop'"),
        (
            f"{WORKER}ConnectionRefusedError: [Errno 111] Connection refused\n\n\tat java",
            UNREACHABLE,
            "cannot reach the broker: ConnectionRefusedError: [Errno 111] Connection refused; name",
        ),
        (
            (
                f"{WORKER}TimeoutError: {UNCONFIRMED}\n\nThe above exception is the direct cause:\n"
                f"kombu_binary_delay.errors.UnconfirmedError: 2 of 2: {UNCONFIRMED}\n\n\tat java"
            ),
            UNREACHABLE,
            "RabbitMQ confirmed nothing for 60 s: look for an alarm with 'rabbitmqctl status', and",
        ),
        (FORCED, UNREACHABLE, "cannot reach the broker: ConnectionForced: (0, 0): (320) CONN"),
        (REFUSED, UNREACHABLE, "cannot reach the broker: AccessRefused: (0, 0): (403) ACCESS_REF"),
        (
            "org.apache.hadoop.security.AccessControlException: Permission denied: hdfs:/lake x",
            USAGE,
            "Spark cannot write hdfs:/lake: name a path",
        ),
        (
            "[TABLE_OR_VIEW_NOT_FOUND] The table or view `a`.`b` cannot be found. Verify",
            USAGE,
            "there is no table `a`.`b`",
        ),
        (
            "[DATA_SOURCE_NOT_FOUND] Failed to find the data source: delta. Make sure",
            USAGE,
            "no format 'delta': add it",
        ),
        (
            (
                "o1.<init>\n: java.lang.IllegalStateException: Cannot call methods on a stopped "
                "SparkContext.\nThis"
            ),
            UNREACHABLE,
            "no Spark runs at spark://h:7077: change spark.master",
        ),
        (
            "<_InactiveRpcError: status = StatusCode.UNAVAILABLE",
            UNREACHABLE,
            "no Spark Connect server answers at",
        ),
        (
            (
                "o1.insertInto.\n: org.apache.spark.SparkException: Job aborted due to stage "
                "failure: A shuffle map stage with indeterminate output was failed and retried. "
                "However, Spark cannot rollback the ResultStage 20 to re-process the input data"
            ),
            USAGE,
            "run the command again, and spark publish with --resume",
        ),
        (
            f"{WORKER}E: {UNCONFIRMED}\n{AGAIN}\nConnectionRefusedError: [Errno 111] Connection\n",
            UNREACHABLE,
            "cannot reach the broker: ConnectionRefusedError: [Errno 111] Connection; name",
        ),
        (
            "An error occurred while calling o1.x\n: java.lang.Error: all wrong\n\tat java.x",
            USAGE,
            "Spark failed: java.lang.Error: all wrong; --verbose shows more",
        ),
    ],
)
def test_what_a_cluster_says_is_one_sentence_too(text, code, sentence):
    @click.command()
    @click.option("--conf", multiple=True)
    def fails(conf):
        raise PySparkException(text)

    done = CliRunner().invoke(explained(fails), ["--conf", "spark.master=spark://h:7077"])
    assert sentence in done.output
    assert len(done.output.splitlines()) == 1
    assert done.exit_code == code


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (FORCED, "ConnectionForced: (0, 0): (320) CONNECTION_FORCED - it stops"),
        (
            f"{WORKER}OSError: Server unexpectedly closed connection\n",
            "OSError: Server unexpectedly closed connection",
        ),
        (
            f"{WORKER}amqp.exceptions.NotAllowed: Connection.open: (530) vhost '/' is down\n",
            "NotAllowed: Connection.open: (530) vhost '/' is down",
        ),
        (REFUSED, None),
        (f"{WORKER}RuntimeError: the stream s begins at 9 now; do this\n", None),
        (
            f"{WORKER}RuntimeError: the stream s gave nothing for 60 s before 9; read it again\n",
            "the stream s gave nothing for 60 s before 9; read it again",
        ),
        (
            f"{WORKER}RuntimeError: the stream s has been deleted, or its node has stopped; so\n",
            "the stream s has been deleted, or its node has stopped; so",
        ),
        ("java.lang.IllegalStateException: Cannot call methods on a stopped SparkContext", None),
    ],
)
def test_an_outage_is_of_the_broker_and_may_end_by_itself(text, said):
    assert outage(PySparkException(text)) == said


def test_a_java_process_that_has_ended_is_not_taken_for_a_broker():
    # What PySpark connects by.
    to_java = JavaParameters(port=free_ports(1)[0])
    gateway = GatewayProperty(auto_field=False, pool=None)
    connection = ClientServerConnection(to_java, PythonParameters(), gateway, None)

    @click.command()
    def asks():
        connection.connect_to_java_server()

    done = CliRunner().invoke(explained(asks))
    assert "the Java process of Spark has ended" in done.output
    assert "goes on with --resume" in done.output
    assert done.exit_code == USAGE


def test_nor_is_a_folder_that_cannot_be_renamed(spark, tmp_path):
    places = [str(tmp_path / name) for name in ("place", "new", "old")]

    found = folders(spark)
    assert found

    @click.command()
    def renames():
        found.replace(*places)

    done = CliRunner().invoke(explained(renames))
    assert done.output == (
        f"{places[1]} cannot be renamed to {places[0]}; what was in {places[0]} is as it was\n"
    )
    assert done.exit_code == USAGE


def test_nor_does_pyspark_print_its_own_traceback_then(spark, capsys):
    with click.Context(click.Command("plan")) as context:
        spark_session(())
    for log in filter(lambda each: isinstance(each, Path), context.meta.values()):
        log.unlink()
    # What its thread does, in which it reads accumulators from the Java process.
    spark.sparkContext._accumulatorServer.handle_error(None, None)  # noqa: SLF001
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("verbose", [False, True])
def test_the_traceback_and_the_log_of_spark_are_shown_if_asked_for(place, verbose):
    env = {**os.environ, "JAVA_HOME": str(place / "java"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "kombu_binary_delay.cli", "spark", "plan", str(place / "rows")]
    done = subprocess.run(
        [*command, *(["--verbose"] if verbose else [])],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == USAGE
    lines = done.stderr.strip().splitlines()
    if verbose:
        assert "UnsupportedClassVersionError" in lines
        assert any("Traceback" in line for line in lines)
    else:
        java = place / "java"
        started, said = lines
        assert started == "starting Spark"
        assert f"the Java at {java} is too old for this PySpark: set JAVA_HOME" in said
