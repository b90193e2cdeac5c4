"""What not every session has, or allows a job. Elsewhere, the pipeline does without.

Spark Connect has no SparkContext, and Databricks serverless no cache. This module must not touch a
broker.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from pyspark.sql import DataFrame, SparkSession


def tracker(session: SparkSession) -> Any:
    """Return what knows how far Spark is; None if the session has no such thing."""
    try:
        return session.sparkContext.statusTracker()
    # Each release raises another error.
    except Exception:  # noqa: BLE001
        return None


@contextmanager
def set_meanwhile(session: SparkSession, name: str, value: str) -> Iterator[None]:
    """Set a configuration meanwhile, for the whole session, unless it is set already."""
    is_set = False
    # A platform may allow no job to do so.
    with suppress(Exception):
        if session.conf.get(name, None) is None:
            session.conf.set(name, value)
            is_set = True
    try:
        yield
    finally:
        if is_set:
            with suppress(Exception):
                session.conf.unset(name)


def cached(df: DataFrame) -> DataFrame:
    """Return the rows so that they are computed once, where Spark can keep them."""
    # Else each query reads the 200 parts of a shuffle, most of them empty.
    name = "spark.sql.optimizer.canChangeCachedPlanOutputPartitioning"
    with set_meanwhile(df.sparkSession, name, "true"):
        try:
            return df.cache()
        except Exception:  # noqa: BLE001 - as above
            return df


def release(df: DataFrame) -> None:
    """Forget rows that were cached, and so free their memory."""
    with suppress(Exception):  # as above
        df.unpersist()


class Folders:
    """Hadoop's file systems, which Spark uses, and which can rename."""

    def __init__(self, java: Any, conf: Any) -> None:
        self._path, self._conf = java.org.apache.hadoop.fs.Path, conf

    def replace(self, place: str, new: str, old: str) -> None:
        """Rename a folder, if it exists, to ``old``, and ``new`` to its name.

        :raises RuntimeError: if the file system refuses, or another process does the same.
        """
        had = self._rename(place, old)
        if not self._rename(new, place):
            kept = f"the rows before are in {old}" if had else f"what was in {place} is as it was"
            raise RuntimeError(f"{new} cannot be renamed to {place}; {kept}")

    def delete(self, folder: str) -> None:
        """Delete a folder with all that is in it."""
        path = self._path(folder)
        path.getFileSystem(self._conf).delete(path, True)

    def _rename(self, source: str, target: str) -> bool:
        given, wanted = self._path(source), self._path(target)
        files = given.getFileSystem(self._conf)
        # Into a folder that exists, it would be moved.
        return bool(
            files.exists(given) and not files.exists(wanted) and files.rename(given, wanted)
        )


def folders(session: SparkSession) -> Folders | None:
    """Return what renames folders; None if the session has no such thing."""
    try:
        java = session.sparkContext._jvm  # noqa: SLF001 - there is no other way to Java
        return Folders(java, session._jsparkSession.sessionState().newHadoopConf())  # noqa: SLF001
    except Exception:  # noqa: BLE001 - as above
        return None


def hush(session: SparkSession) -> None:
    """Keep PySpark from printing a traceback of its own when the Java process dies."""
    try:
        server: Any = session.sparkContext._accumulatorServer  # noqa: SLF001 - it has no other name
    except Exception:  # noqa: BLE001 - as above
        return
    # It counts accumulators in a thread, where nothing catches its errors.
    server.handle_error = lambda *_: None
