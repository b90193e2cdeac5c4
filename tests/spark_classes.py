"""Purpose: an archive of the classes that Spark loads, which its Java processes share.

A dozen tests start Java, and half of what that costs is to load and verify the same classes. The
archive is made once for a Java and a PySpark, and kept in the user's cache; Java itself checks that
it fits, and does without it where it does not.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

#: The Java processes of Spark live for a minute in these tests: to compile their code well would
#: take longer than to run it.
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

_TRAINING = """
import sys
from pyspark import SparkContext
from pyspark.sql import SparkSession, functions as F

archive, folder = sys.argv[1:]
spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.ui.enabled", "false")
    .config("spark.sql.shuffle.partitions", "2")
    .config("spark.sql.codegen.wholeStage", "false")
    .config("spark.driver.bindAddress", "127.0.0.1")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.driver.extraJavaOptions", f"-XX:ArchiveClassesAtExit={archive} -Xlog:disable")
    .getOrCreate()
)
rows = spark.range(20).select(F.concat(F.lit("k"), "id").alias("key"), (F.col("id") % 3).alias("n"))
rows.mapInArrow(lambda batches: batches, rows.schema).write.parquet(folder)
read = spark.read.parquet(folder)
counts = read.groupBy("n").agg(F.count("*").alias("count"), F.max("key"))
read.join(counts, "n").orderBy("key").collect()
spark.createDataFrame([("a", 1)], "key string, n int").collect()
spark.stop()
java = SparkContext._gateway.proc
java.stdin.close()
java.wait()
"""


def java_options() -> str:
    """Return the options of Java processes. It uses the archive as soon as there is one."""
    archive = _path()
    # Not a word of an archive that is not there yet: Spark's scripts read what Java prints.
    shared = f" -XX:SharedArchiveFile={archive} -Xlog:disable" if archive else ""
    return SHORT_LIVED + shared


def make_archive() -> None:
    """Make the archive unless there is one, in half a minute; without it, Spark starts slower."""
    archive = _path()
    # A cache that cannot be written to is none.
    with suppress(OSError):
        if archive and not archive.exists():
            archive.parent.mkdir(parents=True, exist_ok=True)
            _make(archive)


def _make(archive: Path) -> None:
    with archive.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if archive.exists():
            return
        made = archive.with_suffix(".new")
        rows = archive.with_suffix(".rows")
        subprocess.run(
            [sys.executable, "-c", _TRAINING, str(made), str(rows)],
            env={**os.environ, "JAVA_TOOL_OPTIONS": SHORT_LIVED},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        shutil.rmtree(rows, ignore_errors=True)
        if made.exists():
            made.replace(archive)


def _path() -> Path | None:
    """Name the archive; None where there is no Java or no PySpark."""
    java, spark = shutil.which("java"), find_spec("pyspark")
    if java is None or spark is None:
        return None
    binary = Path(java).resolve()
    of = f"{binary} {binary.stat().st_mtime_ns} {spark.origin} {version('pyspark')}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = f"spark-{hashlib.sha256(of.encode()).hexdigest()[:16]}.jsa"
    return cache / "kombu_binary_delay" / "java" / name
