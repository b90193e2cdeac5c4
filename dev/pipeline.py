"""Purpose: show the data pipeline: `make pipeline-demo`.

A DataFrame of reminders is planned, published by Spark, executed by real workers, and audited
against the journal. One executor is killed in the middle. The exit status is 0 only if the audit
proves that nothing was lost and nothing early.

REMINDERS is how many there are, 40,000 unless the environment says otherwise.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as Spark's own documentation has it

from dev.broker import Broker, BrokerError, VHost
from dev.processes import Processes
from dev.worker import Worker, WorkerError
from kombu_binary_delay.spark import schema as s
from kombu_binary_delay.spark.audit import Thresholds, audit
from kombu_binary_delay.spark.journal import export_journal
from kombu_binary_delay.spark.plan import Limits, check, plan, summarize
from kombu_binary_delay.spark.publish import Progress, publish
from kombu_binary_delay.spark.report import audit_page, plan_page, seconds
from kombu_binary_delay.spark.tables import read

REMINDERS = int(os.environ.get("REMINDERS", "40000"))
#: Two cores publish thousands a second, and then execute a thousand.
LEAD = max(30.0, REMINDERS / 1250)  # seconds until the first is due
SPREAD = max(20.0, REMINDERS / 900)  # seconds over which they are due: workers keep up
#: Each runs one task after the other, and waits for the broker's confirm of its event meanwhile.
WORKERS = 3
PATIENCE = 600  # seconds after the last one is due
FOLDER = Path("build", "pipeline-demo")
_ALIVE = "FAILED: no executor was killed, so nothing is proven"


class Pipeline:
    """The demo, with its broker, workers and Spark session."""

    def __init__(self, processes: Processes, vhost: VHost, spark: SparkSession, died: Path) -> None:
        self._processes, self._vhost, self._spark, self._died = processes, vhost, spark, died
        self._begin = time.monotonic()
        self._folder = FOLDER.resolve()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)

    def run(self) -> bool:
        """Run the demo; return whether no task was lost or early."""
        self._reminders().write.parquet(self._path("reminders"))
        reminders = self._spark.read.parquet(self._path("reminders"))
        start = time.time()
        self._plan(_due(reminders, start))
        for _ in range(WORKERS):
            Worker(
                self._processes,
                "dev.pipeline_app",
                {"PIPELINE_BROKER": self._vhost.url},
                "-P",
                "solo",
            )
        self.say(f"{WORKERS} workers run; Spark publishes, and one of its executors will be killed")
        publish(
            _due(reminders, start),
            job_id="demo",
            broker=self._vhost.url,
            app="dev.pipeline_app:app",
            receipts=self._path("receipts"),
            on_progress=self._show,
        )
        killed = self._died.exists()
        self.say("all published; an executor was killed on the way" if killed else _ALIVE)
        self._wait_until_all_is_quiet(start + LEAD + SPREAD)
        return self._audit() and killed

    def say(self, text: str) -> None:
        """Print a line."""
        print(f"{time.monotonic() - self._begin:5.0f} s  {text}", flush=True)  # noqa: T201

    def _path(self, name: str) -> str:
        return str(self._folder / name)

    def _reminders(self) -> DataFrame:
        """Return the reminders: the customer, the task, and the seconds after the start."""
        return self._spark.range(REMINDERS).select(
            F.concat(F.lit("customer-"), "id").alias("key"),
            F.when(F.col("id") % 10 == 0, "dev.pipeline_app.bill")
            .otherwise("dev.pipeline_app.remind")
            .alias("task"),
            F.array("id").alias("args"),
            (F.lit(LEAD) + F.rand(seed=6) * SPREAD).alias("after"),
        )

    def _plan(self, reminders: DataFrame) -> None:
        plan(reminders).write.parquet(self._path("plan"))
        planned = self._spark.read.parquet(self._path("plan"))
        limits = Limits(waiting=5_000_000)
        load = summarize(planned)
        self.say(
            f"planned: {load['waiting']:,} wait at most, {load['due_per_second']:,.0f} a second are"
            f" due, and the broker carries {load['carries']:,.0f}"
        )
        passed = all(verdict["passed"] for verdict in check(load, limits).values())
        outcome = "keeps to" if passed else "exceeds"
        self.say(f"the plan {outcome} the limit of {limits.waiting:,} waiting")
        page = plan_page(planned, limits, load["carries"], "reminders")
        (self._folder / "plan.html").write_text(page, encoding="utf-8")

    def _show(self, progress: Progress) -> None:
        rejected = f", {progress.rejected:,} rejected" if progress.rejected else ""
        if progress.published or rejected:
            self.say(
                f"published {progress.published:,} at {progress.rate:,.0f} a second, "
                f"{progress.remaining:,} to go{rejected}"
            )

    def _wait_until_all_is_quiet(self, last_due: float) -> None:
        quiet, said = 0, -1
        while time.time() < last_due + PATIENCE and quiet < 2:
            time.sleep(6)  # quorum queues report their length every 5 s
            rows = [row for row in self._vhost.queues() if row.get("type") != "stream"]
            # What a dead-letter worker has in its hands is still to come, too.
            held = sum(max(row.get("messages", 0), row.get("messages_dlx", 0)) for row in rows)
            quiet = quiet + 1 if held == 0 and time.time() > last_due else 0
            if held != said:
                self.say(f"{held:,} messages on the broker")
            said = held

    def _audit(self) -> bool:
        export_journal(self._spark, self._vhost.url, self._path("journal"))
        judged = audit(
            read(self._spark, self._path("receipts"), s.RECEIPTS),
            read(self._spark, self._path("journal"), s.JOURNAL),
            # The broker is empty, and all that happened is in the journal.
            patience=0,
            until=datetime.now(UTC),
        )
        judged.write.parquet(self._path("verdicts"))
        verdicts = self._spark.read.parquet(self._path("verdicts"))
        page, summary = audit_page(verdicts, Thresholds(unknown=0, unpublished=0), ["demo"])
        (self._folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        (self._folder / "report.html").write_text(page, encoding="utf-8")
        counts = {name: count for name, count in summary["verdicts"].items() if count}
        self.say("verdicts: " + ", ".join(f"{count:,} {name}" for name, count in counts.items()))
        late = [summary["lateness"][name] or 0.0 for name in ("p50", "p99", "worst")]
        self.say(
            f"lateness: p50 {seconds(late[0])}, p99 {seconds(late[1])}, worst {seconds(late[2])}"
        )
        all_there = summary["tasks"] == REMINDERS and not counts.get(s.STILL_WAITING)
        good: bool = summary["passed"] and all_there
        self.say("nothing lost, nothing early" if good else "FAILED: lost, early or not reported")
        self.say(f"report: {FOLDER / 'report.html'}")
        return good


def _due(reminders: DataFrame, start: float) -> DataFrame:
    """Return the reminders with their due times, and the times from which to publish them."""
    at = (F.lit(start) + F.col("after")) * 1_000_000
    return reminders.withColumns(
        {
            "eta": F.timestamp_micros(at.cast("bigint")),
            "published": F.timestamp_seconds(F.lit(start)),
        }
    )


def session() -> SparkSession:
    """Return a small Spark session that retries failed tasks."""
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    return (
        SparkSession.builder.master("local[2,4]")
        .appName("pipeline-demo")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "4")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.log.level", "ERROR")
        .config("spark.driver.extraJavaOptions", "-XX:+UseSerialGC")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )


@contextmanager
def errors_into(log: Path) -> Iterator[None]:
    """Redirect the errors of processes started meanwhile, such as a JVM, to a file."""
    ours = os.dup(2)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    except Exception:
        os.write(ours, f"pipeline-demo: it failed, see {log}\n".encode())
        raise
    finally:
        os.dup2(ours, 2)
        os.close(ours)


def main() -> int:
    """Run the demo with a broker and Spark; return the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with ExitStack() as stack:
        processes = stack.enter_context(Processes("pipeline"))
        died = processes.folder / "died"
        # The executors' processes have it from this one.
        os.environ.update(PIPELINE_DIES_ONCE=str(died), PIPELINE_DIES_AT=str(REMINDERS // 20))
        broker = stack.enter_context(Broker(os.environ.get("RABBITMQ_ROOT")))
        # Of an executor that is killed it writes much, which nobody needs to see.
        log = FOLDER.with_suffix(".log")
        log.parent.mkdir(exist_ok=True)
        with errors_into(log):
            spark = session()
        stack.callback(spark.stop)
        del os.environ["PIPELINE_DIES_ONCE"]
        pipeline = Pipeline(processes, broker.vhost(), spark, died)
        pipeline.say(f"RabbitMQ {broker.version} and Spark {spark.version} run; its log: {log}")
        pipeline.say(f"{REMINDERS:,} reminders, which need a plan first")
        good = pipeline.run()
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (BrokerError, WorkerError) as error:
        sys.exit(f"pipeline-demo: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
