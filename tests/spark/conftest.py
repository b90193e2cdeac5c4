"""Purpose: one Spark session for the suite, small enough for two cores."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark
import pytest
from pyspark.sql import SparkSession

if TYPE_CHECKING:
    from collections.abc import Iterator


ROOT = Path(__file__).parents[2]
#: What PySpark before 4.2 warns of: it leaves the sockets open from which it has read rows.
OF_OLD_RELEASES = (
    "ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning",
    "ignore:distutils Version classes:DeprecationWarning",
    "ignore:is_datetime64tz_dtype:DeprecationWarning",
)


def pytest_configure(config: pytest.Config) -> None:
    if tuple(map(int, pyspark.__version__.split(".")[:2])) < (4, 2):
        # Without it, they warn of it.
        os.environ["PYARROW_IGNORE_TIMEZONE"] = "1"
        for warning in OF_OLD_RELEASES:
            config.addinivalue_line("filterwarnings", warning)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    home = tmp_path_factory.mktemp("spark")
    # The executors' Python is ours, wherever `python3` may point.
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    session = (
        SparkSession.builder.master("local[2,3]")  # three attempts for a task
        .appName("tests")
        # They import applications from these tests. A JVM that other tests began is used again,
        # with the working directory and the environment of then.
        .config("spark.executorEnv.PYTHONPATH", str(ROOT))
        .config("spark.ui.enabled", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.warehouse.dir", str(home / "warehouse"))
        .config("spark.driver.memory", "1g")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@pytest.fixture
def local_times(spark: SparkSession) -> Iterator[None]:
    """A session in which TIMESTAMP, in SQL and in schemas, is a local time without a zone."""
    spark.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
    yield
    spark.conf.unset("spark.sql.timestampType")
