"""Read and write tables, by a path or by their name in a catalogue.

A *place* is a text that says where a table is:

- ``table:lake.receipts`` or ``table:catalog.lake.receipts``: a table in a catalogue, as in SQL;
- ``FORMAT:PATH``, such as ``delta:/lake/receipts``: a path in one of :data:`FORMATS`;
- anything else: a path of Parquet. ``parquet:PATH`` is one for certain.

Only Spark's own readers, writers and SQL are used, so that a format is a word that goes to Spark.
This module must not touch a broker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from uuid import UUID, uuid4

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType, TimestampType

from .classic import folders, set_meanwhile
from .columns import UNREAD, find, quoted

#: The formats that a place can name. Others are read and written as a table in a catalogue.
FORMATS = ("avro", "csv", "delta", "hudi", "iceberg", "json", "orc", "parquet")
#: The formats that are plain files: a schema can be given, and Hadoop's committer writes them.
_FILES = ("avro", "csv", "json", "orc", "parquet")
#: The formats that have no types of their own, so times would lose their microseconds. How to read
#: them: in CSV, a quote within quotes is doubled (RFC 4180, section 2.7), as most programs write
#: it, while Spark itself expects and writes a backslash. Spark only counts the cells of a row if it
#: reads them all.
_UNTYPED = {
    "csv": {"header": "true", "escape": '"', "columnPruning": "false"},
    "json": {"primitivesAsString": "true"},
}
_TABLE = "table"
#: Hadoop's committer keeps uncommitted files in a folder of the path, and the first job that ends
#: moves or deletes all that is in it, also the files of other jobs. So each task moves its file
#: itself, under a name that no other job has, and no job deletes the folder.
_SHARED = {
    "mapreduce.fileoutputcommitter.algorithm.version": "2",
    "mapreduce.fileoutputcommitter.cleanup.skipped": "true",
    # The same of Hadoop's committers for S3, which would abort the uploads of others.
    "fs.s3a.committer.abort.pending.uploads": "false",
}
#: Spark's and Delta's names for the error that nothing is there.
_MISSING = (
    "PATH_NOT_FOUND",
    "TABLE_OR_VIEW_NOT_FOUND",
    "DELTA_MISSING_DELTA_TABLE",
    "DELTA_PATH_DOES_NOT_EXIST",
    "DELTA_TABLE_NOT_FOUND",
)
#: What Spark 4 and 3.5 say of a table without row-level operations, before anything is run.
_CANNOT_MERGE = ("does not support MERGE INTO TABLE", "MERGE INTO TABLE is not supported")
#: The same of a table in which columns cannot be left out: one of files, or most before Spark 4.1.
_NEEDS_ALL_COLUMNS = ("Cannot write into v1 table", "CANNOT_FIND_DATA")


@dataclass(frozen=True)
class Place:
    """Where a table is.

    :param form: ``"table"``, or the format of the path.
    :param where: the name in the catalogue, or the path.
    """

    form: str
    where: str

    @classmethod
    def parse(cls, text: str) -> Place:
        """Read a place.

        :raises ValueError: if nothing follows the format.
        """
        word, colon, rest = text.partition(":")
        if not colon or word.lower() not in {_TABLE, *FORMATS}:
            return cls("parquet", text)
        if not rest:
            raise ValueError(f"{text!r} names no table: give table:NAME, FORMAT:PATH or a path")
        return cls(word.lower(), rest)

    def __str__(self) -> str:
        return f"{self.form}:{self.where}"

    @property
    def is_table(self) -> bool:
        """Whether it is a table in a catalogue."""
        return self.form == _TABLE

    @property
    def is_files(self) -> bool:
        """Whether it is a path of plain files, which no table format manages."""
        return self.form in _FILES

    @property
    def sql(self) -> str:
        """Its name in SQL."""
        return self.where if self.is_table else f"{self.form}.{quoted(self.where)}"

    def beside(self, what: str) -> Place:
        """Return the place of another table beside this one."""
        if not self.is_table:
            return Place(self.form, f"{self.where.rstrip('/')}-{what}")
        if self.where.endswith("`"):
            return Place(_TABLE, f"{self.where[:-1]}_{what}`")
        return Place(_TABLE, f"{self.where}_{what}")


def read(session: SparkSession, place: str | Place, schema: str | None = None) -> DataFrame:
    """Return a table.

    CSV files need a header line, which must be the same in all files of a folder.

    :param schema: return these columns, null where the table does not have one. Without it, return
        all columns; those of CSV and JSON files are text, and null in a row that Spark cannot read,
        such as one with a cell too few: its text is in the column ``_corrupt_record``.
    :raises ValueError: for a folder of CSV files that has a column without a name.
    """
    place = _place(place)
    if place.is_table:
        # Spark keeps the list of a table's files, and knows of no rows that others append.
        session.catalog.refreshTable(place.where)
        table = session.table(place.where)
    elif schema is not None and place.is_files and place.form != "csv":
        # In CSV, Spark would take the columns by their order. A row of JSON that it cannot read
        # would have no values, and not be missed.
        rows = session.read.schema(schema).option("mode", "FAILFAST")
        return rows.format(place.form).load(place.where)
    elif place.form in _UNTYPED:
        table = _text(session, place, "PERMISSIVE" if schema is None else "FAILFAST")
    else:
        table = session.read.format(place.form).load(place.where)
    if schema is None:
        return table
    columns = (each.split() for each in schema.split(", "))
    return table.select(*(_column(table, name).cast(kind).alias(name) for name, kind in columns))


def existing(session: SparkSession, place: str | Place, schema: str) -> DataFrame | None:
    """Return a table with these columns; None if there is no such table."""
    place = _place(place)
    try:
        if place.is_files:
            # Of one path that is missing, Spark logs a traceback of a hundred lines; of two, none.
            paths = [place.where, place.where]
            _ = session.read.schema(schema).format(place.form).load(paths).schema
        table = read(session, place, schema)
        # Spark Connect does not look for the table before it is asked something.
        _ = table.schema
    except AnalysisException as exc:
        if not any(name in str(exc) for name in _MISSING):
            raise
        return None
    return table


def create(session: SparkSession, place: str | Place, schema: StructType) -> None:
    """Create the table if it is missing, and check that several jobs can append to it at once.

    :raises ValueError: if they cannot, or if the format does not keep types.
    """
    place = _place(place)
    if place.form in _UNTYPED:
        raise ValueError(f"{place} is for input only: {place.form} keeps no types; take parquet")
    if not place.is_table:
        return
    columns = ", ".join(f"{quoted(each.name)} {_type_of(each)}" for each in schema)
    form = _session_format(session, place.where)
    how = "" if form is None else f" USING {form}"
    if form in _FILES:
        how += f" OPTIONS ({_assignments(_SHARED)})"
    try:
        session.sql(f"CREATE TABLE IF NOT EXISTS {place.where} ({columns}){how}")
    except AnalysisException:
        # Spark looks first and then creates: another job may have done so between.
        if not session.catalog.tableExists(place.where):
            raise
    _check_shared(session, place.where)


def check_nulls(session: SparkSession, place: str | Place, columns: Iterable[str]) -> None:
    """Check that columns of a table take null; a place that is no table always passes.

    :raises ValueError: names those that do not.
    """
    place = _place(place)
    if not place.is_table:
        return
    table = session.table(place.where).schema
    refusing = [each.name for each in table if not each.nullable]
    strict = [each for each in columns if find(refusing, each) is not None]
    if strict:
        raise ValueError(
            f"the table {place.where} takes no null in {', '.join(strict)}, where some rows have "
            f"one: let them be null, or take another table"
        )


def append(df: DataFrame, place: str | Place) -> None:
    """Append rows to a table; other jobs may append at the same time.

    In plain files, a Spark task's rows can be read as soon as that task has ended.

    :raises ValueError: see :func:`create`.
    """
    place = _place(place)
    create(df.sparkSession, place, df.schema)
    with with_statistics(df.sparkSession):
        if place.is_table:
            _insert(df, place.where)
        else:
            options = _SHARED if place.is_files else {}
            df.write.format(place.form).options(**options).mode("append").save(place.where)


def overwrite(df: DataFrame, place: str | Place) -> None:
    """Replace all rows of a table. Until the new ones are stored, the old ones stay there.

    So are all partitions: if ``spark.sql.sources.partitionOverwriteMode`` is "dynamic", it is
    "static" meanwhile, for the whole session.

    Spark itself would first delete the old files. It still does in a table of files in its own
    catalogue, and over Spark Connect, where nothing can rename.

    :raises ValueError: see :func:`create`.
    """
    place = _place(place)
    create(df.sparkSession, place, df.schema)
    if place.is_table:
        with _of_all_partitions(df.sparkSession), with_statistics(df.sparkSession):
            _insert(df, place.where, replace=True)
    elif place.is_files and (found := folders(df.sparkSession)):
        # Of this run alone: if two runs end at the same time, the rows are all of one of them.
        run = place.beside(f"staged-{uuid4()}").where
        try:
            with with_statistics(df.sparkSession):
                df.write.format(place.form).save(f"{run}/new")
        except BaseException:
            # A task that is still writing may make it again; nobody reads it.
            found.delete(run)
            raise
        found.replace(place.where, f"{run}/new", f"{run}/old")
        found.delete(run)
    else:
        with _of_all_partitions(df.sparkSession), with_statistics(df.sparkSession):
            df.write.format(place.form).mode("overwrite").save(place.where)


def with_statistics(session: SparkSession) -> AbstractContextManager[None]:
    """Write times to Parquet with statistics, by which a reader leaves out files.

    Spark's default type of times has none, and Iceberg and Delta Lake do not take it. No option of
    a write changes it, so it is set for the whole session meanwhile, unless it is set already.
    """
    return set_meanwhile(session, "spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")


def merge(df: DataFrame, place: str | Place, keys: Sequence[str]) -> bool:
    """Replace the rows that have the same keys, and add the others, in one step.

    :param df: stored rows, because a table format may read them more than once; a key once.
    :returns: False if the table cannot merge; then it is as it was.
    :raises ValueError: see :func:`create`.
    """
    place = _place(place)
    create(df.sparkSession, place, df.schema)
    is_folder = not (place.is_files or place.is_table)
    if is_folder and existing(df.sparkSession, place, f"{keys[0]} string") is None:
        return False  # there is nothing to merge with, and no name for it in SQL yet
    columns = [quoted(name) for name in df.columns]
    same = " AND ".join(f"t.{name} <=> s.{name}" for name in map(quoted, keys))
    changed = ", ".join(f"t.{name} = s.{name}" for name in columns)
    added = f"({', '.join(columns)}) VALUES ({', '.join(f's.{name}' for name in columns)})"
    actions = f"WHEN MATCHED THEN UPDATE SET {changed} WHEN NOT MATCHED THEN INSERT {added}"
    return _merged(df, place, f"ON {same} {actions}")


def delete_matched(df: DataFrame, place: str | Place, condition: str) -> bool:
    """Delete the rows ``t`` of a table that match a row ``s``, in one step.

    :param df: as in :func:`merge`.
    :returns: False if the table cannot do that; then it is as it was.
    """
    return _merged(df, _place(place), f"ON {condition} WHEN MATCHED THEN DELETE")


def reads_once(session: SparkSession, place: str | Place) -> bool:
    """Return whether Spark computes rows once to append them, as to files.

    For a table of another catalogue, Spark may compute them twice, to sort them by their values.
    """
    place = _place(place)
    if not place.is_table:
        return place.is_files
    return _is_of_files(_described(session, place.where))


def stage(df: DataFrame, place: str | Place, job: UUID) -> tuple[DataFrame, Callable[[], None]]:
    """Store a job's rows beside a table, as long as it runs.

    :returns: the rows as they are stored, and a function that deletes them, together with those
        that the job's earlier runs have left.
    :raises ValueError: if the rows are not seen where they were written.
    """
    place = _place(place)
    session = df.sparkSession
    if place.is_table:
        kept = place.beside(f"staged_{job.hex}").where

        def drop() -> None:
            session.sql(f"DROP TABLE IF EXISTS {kept}")

        drop()
        seen = Observation()
        once = reads_once(session, place)
        append(_counted(df, seen) if once else df, Place(_TABLE, kept))
        if once:
            _check_seen(session.table(kept), seen, kept)
        return session.table(kept), drop
    # Of this job alone: jobs may share a table of receipts.
    of_job = f"{place.beside('staged').where}/{job}"
    path = f"{of_job}/{uuid4()}"
    seen = Observation()
    _counted(df, seen).write.mode("overwrite").parquet(path)
    stored = session.read.schema(df.schema).parquet(path)
    _check_seen(stored, seen, path)

    def empty() -> None:
        # Spark has no function that deletes files, but this write empties the whole folder.
        session.createDataFrame([], stored.schema).write.mode("overwrite").parquet(of_job)

    return stored, empty


def _counted(df: DataFrame, seen: Observation) -> DataFrame:
    return df.observe(seen, F.count("*").alias("rows"))


def _check_seen(stored: DataFrame, seen: Observation, where: str) -> None:
    """Check that the driver sees all rows that executors have written.

    :raises ValueError: if it does not.
    """
    # Over Spark Connect, a server that is busy ends the command without what was observed.
    written, there = seen.get.get("rows"), stored.count()
    if written not in (there, None):
        raise ValueError(
            f"of {written:,} rows that Spark has written to {where}, {there:,} are there: name a "
            f"place that the driver and all executors see as one, such as one of HDFS or S3"
        )


def _place(place: str | Place) -> Place:
    return place if isinstance(place, Place) else Place.parse(place)


def _type_of(column: StructField) -> str:
    # Spark's own name for it may be that of another type, by spark.sql.timestampType.
    if isinstance(column.dataType, TimestampType):
        return "timestamp_ltz"
    return column.dataType.simpleString()


def _assignments(options: dict[str, str]) -> str:
    return ", ".join(f"'{name}' = '{value}'" for name, value in options.items())


def _text(session: SparkSession, place: Place, mode: str) -> DataFrame:
    """Return a table with each value as it is written: any type that Spark infers changes some.

    A key 007 is not 7, and the object {"a": 1} has no "b", though one in another row does.

    :param mode: Spark's mode for rows that it cannot read.
    """
    reader = session.read.format(place.form).options(**_UNTYPED[place.form])
    reader = reader.option("columnNameOfCorruptRecord", UNREAD)
    found = reader.load(place.where)
    names = found.columns
    columns = [StructField(name, StringType()) for name in names]
    if place.form != "csv":
        return reader.schema(StructType(columns)).load(place.where)
    # Spark would take the cells of each file by their order, whatever its header line.
    reader = reader.option("enforceSchema", str(_has_unnamed(found, place)).lower())
    columns.append(StructField(UNREAD, StringType()))
    table = reader.option("mode", mode).schema(StructType(columns)).load(place.where)
    # In a row with a cell too few or too many, any cell may be that of another column.
    is_read = F.col(UNREAD).isNull()
    cells = (F.when(is_read, F.col(quoted(name))).alias(name) for name in names)
    return table.select(*cells, UNREAD)


def _has_unnamed(table: DataFrame, place: Place) -> bool:
    """Return whether a CSV file has a column without a name, which Spark cannot compare.

    :raises ValueError: if there are several files, whose header lines may differ.
    """
    unnamed = [at for at, name in enumerate(table.columns, 1) if name == f"_c{at - 1}"]
    if unnamed and len(table.inputFiles()) > 1:
        raise ValueError(
            f"{place} has several files, and their column {unnamed[0]} has no name: name it in the "
            f"header line of each file, by which they are compared"
        )
    return bool(unnamed)


def _column(table: DataFrame, name: str) -> Column:
    found = find(table.columns, name)
    return F.lit(None) if found is None else F.col(quoted(found))


def _session_format(session: SparkSession, name: str) -> str | None:
    """Return the format of new tables in Spark's own catalogue; None in another catalogue."""
    first, dot, _ = name.replace("`", "").partition(".")
    if first != "spark_catalog":
        is_catalogue = dot and session.conf.get(f"spark.sql.catalog.{first}", "")
        if is_catalogue or session.catalog.currentCatalog() != "spark_catalog":
            return None
    return str(session.conf.get("spark.sql.sources.default", "parquet"))


def _check_shared(session: SparkSession, name: str) -> None:
    """Check that a table of plain files in Spark's catalogue has the options of the committer."""
    found = _described(session, name)
    if not _is_of_files(found):
        return
    form, given = found["Provider"].lower(), found.get("Storage Properties", "")
    if not all(f"{option}={value}" in given for option, value in _SHARED.items()):
        raise ValueError(
            f"the table {name} is of {form} files, and jobs that append to it at the same time "
            f"would delete each other's rows; run once: "
            f"ALTER TABLE {name} SET SERDEPROPERTIES ({_assignments(_SHARED)})"
        )


def _described(session: SparkSession, name: str) -> dict[str, str]:
    rows = session.sql(f"DESCRIBE TABLE EXTENDED {name}").collect()
    return {row["col_name"]: row["data_type"] or "" for row in rows}


def _is_of_files(described: dict[str, str]) -> bool:
    """Return whether a table is of plain files in Spark's catalogue."""
    return described.get("Provider", "").lower() in {"hive", *_FILES}


def _insert(df: DataFrame, name: str, *, replace: bool = False) -> None:
    """Insert rows by their columns' names, and leave the table's other columns to the table.

    :raises ValueError: if a column is missing, or another one must have a value; before any row is
        computed.
    """
    table = df.sparkSession.table(name).schema
    missing = [each for each in df.columns if find(table.names, each) is None]
    if missing:
        raise ValueError(f"the table {name} has no columns {', '.join(missing)}: add them")
    others = [each for each in table if find(df.columns, each.name) is None]
    if others:
        theirs = {each.name for each in others}
        ours = _named_as(df, [each for each in table.names if each not in theirs]).writeTo(name)
        try:
            # A null of ours would fail where the table generates the column.
            if replace:
                ours.overwrite(F.lit(True))
            else:
                ours.append()
        except AnalysisException as exc:
            if not any(words in str(exc) for words in _NEEDS_ALL_COLUMNS):
                raise
        else:
            return
        needed = [each.name for each in others if not each.nullable]
        if needed:
            raise ValueError(
                f"the table {name} has columns that are not ours and take no null, "
                f"{', '.join(needed)}, and this Spark cannot leave them out: let them be null, or "
                f"take another table"
            )
    # Spark does it by their order.
    _named_as(df, table.names).write.insertInto(name, overwrite=replace)


def _named_as(df: DataFrame, names: Sequence[str]) -> DataFrame:
    """Return the columns of these names, spelled so, in this order; null where there is none."""
    return df.select(*(_column(df, each).alias(each) for each in names))


@contextmanager
def _of_all_partitions(session: SparkSession) -> Iterator[None]:
    """Make an overwrite replace partitions for which there are no new rows, too.

    An option of the write would have no effect on a table in a catalogue.
    """
    name = "spark.sql.sources.partitionOverwriteMode"
    before = str(session.conf.get(name, "static"))
    if before.lower() != "dynamic":
        # Not set where it need not be: a platform may allow no job to do so.
        yield
        return
    session.conf.set(name, "static")
    try:
        yield
    finally:
        session.conf.set(name, before)


def _merged(df: DataFrame, place: Place, how: str) -> bool:
    if place.is_files:
        return False  # Spark, if asked, looks into them first
    session = df.sparkSession
    view = f"merged_{uuid4().hex}"
    df.createOrReplaceTempView(view)
    try:
        session.sql(f"MERGE INTO {place.sql} t USING {view} s {how}")
    except Exception as exc:
        if any(words in str(exc) for words in _CANNOT_MERGE):
            return False
        raise
    finally:
        session.catalog.dropTempView(view)
    return True
