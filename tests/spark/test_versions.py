"""What differs between the versions of PySpark, on whichever of them the tests run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import types as t

from kombu_binary_delay.spark import schema as s
from kombu_binary_delay.spark import versions
from kombu_binary_delay.spark.journal import JournalSource
from kombu_binary_delay.spark.send import Sender, Target

ROOT = Path(__file__).parents[2]
PIPELINE = ROOT / "kombu_binary_delay" / "spark"
_AS_ON_3_5 = """
import sys
sys.modules["pyspark.sql.datasource"] = None  # there is no such module

from kombu_binary_delay.spark import audit, journal, plan, publish
from kombu_binary_delay.spark.report import figures
try:
    from kombu_binary_delay.spark import sink
except ImportError as exc:
    print(exc)
"""


def test_without_data_sources_all_is_there_but_the_sink_which_says_so_in_a_sentence():
    script = [sys.executable, "-c", _AS_ON_3_5]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(script, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        r"the format celery_delayed needs the module pyspark\.sql\.datasource of PySpark 4\.0 or "
        r"later, and this is PySpark [\d.]+; use publish\(\) instead",
        done.stdout.strip(),
    )


@pytest.mark.skipif(not versions.HAS_SOURCES, reason="PySpark 3.5 has no sinks in Python")
def test_a_stream_is_refused_in_a_sentence_where_only_batches_can_be_written(monkeypatch):
    from kombu_binary_delay.spark.sink import CelerySink  # noqa: PLC0415 - not in PySpark 3.5

    monkeypatch.setattr(versions, "HAS_STREAM_SINKS", False)
    with pytest.raises(NotImplementedError, match=r"DataSourceStreamArrowWriter of PySpark 4\.1"):
        CelerySink({}).streamWriter(t.StructType(), overwrite=False)


def test_a_source_is_read_without_data_sources_as_with_them(spark, vhost):
    rows = [{"task": "t", "task_id": f"{n}", "countdown": 3600.0} for n in range(10)]
    for _ in Sender(Target(vhost.url, settings={"journal": "stream"})).send([rows]):
        pass
    options = {"broker": vhost.url, "start": "4", "partitions": "3"}
    found = versions.load_by_map(spark, JournalSource, options)
    assert found.schema == spark.createDataFrame([], s.JOURNAL).schema
    assert sorted(row.offset for row in found.collect()) == list(range(4, 10))
    with pytest.raises(Exception, match="needs the option broker"):
        versions.load_by_map(spark, JournalSource, {})


def test_no_other_module_asks_for_the_version():
    asks = re.compile(r"pyspark\.__version__|spark\.version|pyspark\.sql\.datasource|HAS_S")
    files = [path for path in PIPELINE.rglob("*.py") if asks.search(path.read_text())]
    assert files == [PIPELINE / "versions.py"]


def test_nothing_needs_the_java_side_of_a_session():
    # Spark Connect has none of it: no RDD, no SparkContext, no gateway to a JVM. What one module
    # has of it, nothing needs.
    java = re.compile(
        r"\.(rdd|_j(df|vm|sc|c|sparkSession)|_sc|sparkContext|cache|persist)\b|SparkContext[.(]"
    )
    files = [path for path in PIPELINE.rglob("*.py") if java.search(path.read_text())]
    assert files == [PIPELINE / "classic.py"]


def test_spark_submit_knows_the_options_that_pages_give_it():
    submit = str(Path(pyspark.__file__).parent / "bin" / "spark-submit")
    told = subprocess.run([submit, "--help"], capture_output=True, text=True, check=False)
    known = set(re.findall(r"--[\w-]+", told.stdout + told.stderr))
    pages = [ROOT / "docs" / "how-to" / name for name in ("spark.md", "spark-platforms.md")]
    text = "".join(re.sub(r"\\\n\s*", "", page.read_text()) for page in pages)
    lines = re.findall(r"^spark-submit (.*)", text, re.MULTILINE)
    assert len(lines) > 4
    for line in lines:
        words = shlex.split(line)
        while words and words[0].startswith("--"):
            option, value, *words = words
            assert option in known, line
            assert option != "--conf" or re.fullmatch(r"spark\.[\w.]+=.+", value), line
        # A server is a class, without a file. What follows the file is the tool's own.
        if words != ["…"]:
            assert re.search(r"main(__)?\.py$", words[0]) if words else "--class" in line
