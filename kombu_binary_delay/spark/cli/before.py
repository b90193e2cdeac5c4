"""What can be checked in a moment, before Spark starts, which takes many seconds.

Only where Spark runs on this machine, as without any configuration: elsewhere, paths and brokers
may be within reach of the cluster and not of this machine.
"""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from kombu import Connection

from kombu_binary_delay.celery_side.failures import BROKER_ERRORS, in_words
from kombu_binary_delay.celery_side.urls import check_url, for_kombus_transport, is_broker_url

from .failures import (
    CANNOT_IMPORT,
    CANNOT_START,
    UNREACHABLE,
    WRONG_PYTHON,
    Failure,
    is_verbose,
    keep_log,
)

#: Where one of these is set, Spark may run elsewhere or have other defaults.
_ELSEWHERE = (
    "HADOOP_CONF_DIR",
    "PYSPARK_GATEWAY_PORT",
    "PYSPARK_SUBMIT_ARGS",
    "SPARK_CONF_DIR",
    "SPARK_HOME",
    "SPARK_REMOTE",
    "YARN_CONF_DIR",
)
#: Where one of these is set, the log is configured, or no Java process starts here.
_CONFIGURED = ("PYSPARK_GATEWAY_PORT", "SPARK_CONF_DIR", "SPARK_HOME", "SPARK_REMOTE")
_SETTINGS_ELSEWHERE = ("spark.remote", "spark.hadoop.fs.defaultFS")


def check_before(
    conf: tuple[str, ...],
    *,
    reads: tuple[str | None, ...] = (),
    writes: tuple[str | None, ...] = (),
    broker: str | None = None,
    app: str | None = None,
) -> None:
    """Check what a subcommand needs.

    :param reads: paths to read; a broker's URL among them is checked as such, and None is not.
    :param writes: paths to write.
    :param broker: the URL to connect to; None for that of ``app``, if that is given.
    :param app: ``MODULE:NAME`` of a Celery app.
    :raises Failure: names what is missing.
    :raises ValueError: for a broker's URL that cannot be read.
    """
    for url in (broker, *filter(is_broker_url, filter(None, reads))):
        check_url(url or "")
    if not is_alone(conf):
        return
    for path in filter(None, reads):
        if is_broker_url(path):
            broker = path
        else:
            _check_read(path)
    for path in filter(None, writes):
        _check_write(path)
    if broker is not None or app is not None:
        _check_broker(broker, app)
    _check_java()
    if "spark.pyspark.python" not in _settings(conf):
        # Not the first python3 in the path: this one has the package, and is of the same version.
        _check_python(os.environ.setdefault("PYSPARK_PYTHON", sys.executable), app)


def is_alone(conf: tuple[str, ...]) -> bool:
    """Return whether Spark will start on this machine, for this subcommand alone."""
    settings = _settings(conf)
    return (
        settings.get("spark.master", "local").startswith("local")
        and not any(map(os.environ.get, _ELSEWHERE))
        and not any(name in settings for name in _SETTINGS_ELSEWHERE)
    )


@contextmanager
def quiet(conf: tuple[str, ...]) -> Iterator[None]:
    """Write the log of a Java process that starts here to a file, named where an error needs it.

    The process inherits the error output of this one, and keeps it. With ``--verbose``, or where
    the user has configured the log, it goes there.
    """
    configured = "spark.log.level" in _settings(conf) or any(map(os.environ.get, _CONFIGURED))
    if is_verbose() or configured:
        yield
        return
    descriptor, name = tempfile.mkstemp(prefix="kombu-binary-delay-spark-", suffix=".log")
    keep_log(Path(name))
    ours = os.dup(2)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    try:
        yield
    finally:
        os.dup2(ours, 2)
        os.close(ours)


def _settings(conf: tuple[str, ...]) -> dict[str, str]:
    return dict(each.partition("=")[::2] for each in conf)


def here(path: str) -> Path | None:
    """Return a path of this machine, from a URL too; None for one of another file system."""
    place = urlsplit(path)
    if place.scheme == "file":
        return Path(url2pathname(place.path))
    # A drive letter is not a URL scheme.
    return None if len(place.scheme) > 1 else Path(path)


def _local(path: str) -> Path | None:
    """Return a path of this machine; None for a table, or for another file system."""
    from kombu_binary_delay.spark.tables import Place  # noqa: PLC0415 - needs PySpark

    table = Place.parse(path)
    return None if table.is_table else here(table.where)


def _check_read(path: str) -> None:
    local = _local(path)
    # Spark knows patterns with braces, which Python does not.
    if local is None or "{" in path or local.exists() or glob.glob(str(local)):  # noqa: PTH207
        return
    raise Failure(f"there is nothing at {path}: name a path that exists, from {Path.cwd()}")


def _check_write(path: str) -> None:
    local = _local(path)
    if local is None:
        return
    there = local.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    is_place = there.is_dir() or there == local.absolute()
    if is_place and os.access(there, os.W_OK):
        return
    why = "may not be written to" if is_place else "is no folder"
    raise Failure(f"{path} cannot be written, since {there} {why}: name a path where it can")


def _check_broker(url: str | None, app: str | None) -> None:
    from kombu_binary_delay.spark.send import Target  # noqa: PLC0415 - needs Celery

    connection = _Address(str(url)).plain() if app is None else Target(url, app).connection()
    try:
        with connection:
            connection.connect()
    except BROKER_ERRORS as exc:
        option = "--broker" if url else "the Celery app's broker_url"
        place = _Address(url or connection.as_uri(include_password=True), option)
        raise Failure(in_words(exc, place), UNREACHABLE) from exc


class _Address:
    def __init__(self, url: str, option: str = "--broker") -> None:
        self.url, self.option = url, option

    def plain(self) -> Any:
        url, ssl = for_kombus_transport(self.url)
        return Connection(url, ssl=ssl or False, connect_timeout=10)


def _check_java() -> None:
    home = os.environ.get("JAVA_HOME")
    place = shutil.which(str(Path(home, "bin", "java")) if home else "java")
    if place is None:
        where = f"at JAVA_HOME, {home}" if home else "in PATH"
        raise Failure(
            f"there is no Java {where}, and Spark runs on Java: install Java 17 or later, or set "
            f"JAVA_HOME to where it is"
        )


def _check_python(python: str, app: str | None) -> None:
    """Check the Python of Spark's workers, which have the folder and the environment of this one.

    Spark would try it for each part of the data, several times.
    """
    needed = ["kombu_binary_delay", "numpy", "pyarrow"]
    if app is not None:
        needed.append(app.partition(":")[0].partition(".")[0])
    code = (
        "import sys; from importlib.util import find_spec; print('%d.%d' % sys.version_info[:2], "
        "*(each for each in sys.argv[1:] if find_spec(each) is None))"
    )
    try:
        done = subprocess.run(  # noqa: S603 - what Spark would run
            [python, "-c", code, *needed], check=True, capture_output=True, text=True
        )
    except (OSError, subprocess.SubprocessError) as exc:
        raise Failure(CANNOT_START.format(python, python=sys.executable)) from exc
    version, *missing = done.stdout.split()
    ours = ".".join(map(str, sys.version_info[:2]))
    if version != ours:
        worker = f" (PYSPARK_PYTHON is {python})"
        raise Failure(WRONG_PYTHON.format(version, ours, worker=worker, python=sys.executable))
    if missing:
        raise Failure(CANNOT_IMPORT.format(missing[0]))
