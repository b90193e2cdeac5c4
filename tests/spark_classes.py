"""Purpose: an archive of the classes that Spark loads, which its Java processes share.

A dozen tests start Java, and half of what that costs is to load and verify the same classes. The
archive is made once, when the tests are installed (dev/install.sh), and kept in the virtual
environment. Java itself checks that it fits, and does without it where it does not.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

#: Spark's Java processes live for a minute in these tests, and their jobs are small. To compile
#: their code well, or expressions of a query at all, or to plan a query anew after each of its
#: stages, would take longer than to run them. And to name the place of a column in errors, PySpark
#: asks Java ten times for each.
SHORT_LIVED = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xmn400m -Dspark.sql.shuffle.partitions=2"
    " -Dspark.sql.codegen.wholeStage=false -Dspark.sql.codegen.factoryMode=NO_CODEGEN"
    " -Dspark.sql.adaptive.enabled=false -Dspark.python.sql.dataFrameDebugging.enabled=false"
)

_TRAINING = """
import sys
from pyspark import SparkContext
from pyspark.sql import SparkSession, functions as F

archive, folder = sys.argv[1:]
spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.ui.enabled", "false")
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


#: Beside the PySpark that it is made for.
ARCHIVE = Path(sys.prefix, "spark-classes.jsa")


def java_options() -> str:
    """Return the options of Java processes."""
    # Not a word of an archive that does not fit: Spark's scripts read what Java prints.
    shared = f" -XX:SharedArchiveFile={ARCHIVE} -Xlog:disable" if ARCHIVE.exists() else ""
    return SHORT_LIVED + shared


def make_archive() -> None:
    """Make the archive unless there is one, in half a minute; without it, Spark starts slower."""
    if ARCHIVE.exists() or shutil.which("java") is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "made.jsa")
        subprocess.run(
            [sys.executable, "-c", _TRAINING, str(made), str(Path(folder, "rows"))],
            env={
                **os.environ,
                "JAVA_TOOL_OPTIONS": SHORT_LIVED,
                "PYSPARK_PYTHON": sys.executable,
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
            timeout=600,
        )
        if made.exists():
            shutil.move(made, ARCHIVE)


if __name__ == "__main__":
    make_archive()
