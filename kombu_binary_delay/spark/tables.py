"""Read and write tables, by a path or by their name in a catalogue.

A *place* is a text that says where a table is:

- ``table:lake.receipts`` or ``table:catalog.lake.receipts``: a table in a catalogue, as in SQL;
- ``FORMAT:PATH``, such as ``delta:/lake/receipts``: a path in one of :data:`FORMATS`;
- anything else: a path of Parquet. ``parquet:PATH`` is one for certain.

Only Spark's own readers, writers and SQL are used, so that a format is a word that goes to Spark.
In plain files, each append has a folder of its own, so that several jobs can append at once. This
module must not touch a broker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from uuid import uuid4

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType, TimestampType

from . import schema as s
from .columns import UNREAD, find, quoted

#: The formats that a place can name. Others are read and written as a table in a catalogue.
FORMATS = ("avro", "csv", "delta", "hudi", "iceberg", "json", "orc", "parquet")
#: The formats that are plain files, which no table format manages.
_FILES = ("avro", "csv", "json", "orc", "parquet")
#: The formats that have no types of their own, and how to read them: in CSV, a quote within quotes
#: is doubled (RFC 4180, section 2.7), and all files have the same header line.
_UNTYPED = {
    "csv": {"header": "true", "escape": '"', "columnPruning": "false", "enforceSchema": "false"},
    "json": {"primitivesAsString": "true"},
}
_TABLE = "table"
#: The column that Spark makes of the folders of appends; only in plain files.
PART = "part"
#: Spark's and Delta's names for the error that nothing is there.
_MISSING = (
    "PATH_NOT_FOUND",
    "TABLE_OR_VIEW_NOT_FOUND",
    "DELTA_MISSING_DELTA_TABLE",
    "DELTA_PATH_DOES_NOT_EXIST",
    "DELTA_TABLE_NOT_FOUND",
)


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

    :param schema: return these columns, null where the table does not have one. A row of CSV or
        JSON that Spark cannot read is then an error that names its file. Without it, return all
        columns; those of CSV and JSON files are text. The text of a row that Spark cannot read,
        such as one with a cell too few, is in the column ``_corrupt_record``.
    """
    place = _place(place)
    if place.is_table:
        # Spark keeps the list of a table's files, and knows of no rows that others append.
        session.catalog.refreshTable(place.where)
        table = session.table(place.where)
    elif place.form in _UNTYPED:
        table = _text(session, place, "PERMISSIVE" if schema is None else "FAILFAST")
    elif schema is not None and place.is_files:
        table = session.read.schema(schema).format(place.form).load(place.where)
    else:
        table = session.read.format(place.form).load(place.where)
    if schema is None:
        return table.drop(PART) if place.is_files else table
    columns = s.columns_of(schema).items()
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


def empty(session: SparkSession, schema: str) -> DataFrame:
    """Return a table without rows; Spark's own way to make it takes twice the time to write."""
    columns = s.columns_of(schema).items()
    nulls = ", ".join(f"CAST(NULL AS {kind}) AS {quoted(name)}" for name, kind in columns)
    return session.sql(f"SELECT {nulls} LIMIT 0")


def append(df: DataFrame, place: str | Place) -> None:
    """Append rows to a table, which is created if it is missing.

    :raises ValueError: if the format does not keep types.
    """
    place = _place(place)
    _check_typed(place)
    if place.is_files:
        place = Place(place.form, f"{place.where.rstrip('/')}/{PART}=p{uuid4().hex}")
    _save(df, place, "append")


def overwrite(df: DataFrame, place: str | Place) -> None:
    """Replace all rows of a table. Of plain files, Spark deletes the old ones first.

    :raises ValueError: if the format does not keep types.
    """
    place = _place(place)
    _check_typed(place)
    _save(df, place, "overwrite")


def merge(df: DataFrame, place: str | Place, keys: Sequence[str]) -> None:
    """Replace the rows that have the same keys, and add the others; overwrite plain files.

    :param df: stored rows, because a table format may read them more than once; a key once.
    """
    place = _place(place)
    session = df.sparkSession
    if existing(session, place, f"{keys[0]} string") is None:
        append(df, place)
    elif place.is_files or (place.is_table and _is_of_files(session, place.where)):
        overwrite(df, place)
    else:
        same = " AND ".join(f"t.{quoted(key)} <=> s.{quoted(key)}" for key in keys)
        columns = [quoted(name) for name in df.columns]
        changed = ", ".join(f"t.{name} = s.{name}" for name in columns)
        added = f"({', '.join(columns)}) VALUES ({', '.join(f's.{name}' for name in columns)})"
        view = f"merged_{uuid4().hex}"
        df.createOrReplaceTempView(view)
        try:
            session.sql(
                f"MERGE INTO {place.sql} t USING {view} s ON {same} "
                f"WHEN MATCHED THEN UPDATE SET {changed} WHEN NOT MATCHED THEN INSERT {added}"
            )
        finally:
            session.catalog.dropTempView(view)


def delete(session: SparkSession, place: Place) -> None:
    """Delete a table, or all rows of a folder: Spark has no function that deletes files."""
    if place.is_table:
        session.sql(f"DROP TABLE IF EXISTS {place.where}")
    else:
        nothing = empty(session, "nothing string")
        nothing.write.format(place.form).mode("overwrite").save(place.where)


def _save(df: DataFrame, place: Place, mode: str) -> None:
    session = df.sparkSession
    with _micros(session):
        if not place.is_table:
            df.write.format(place.form).mode(mode).save(place.where)
            return
        columns = ", ".join(f"{quoted(column.name)} {_type_of(column)}" for column in df.schema)
        session.sql(f"CREATE TABLE IF NOT EXISTS {place.where} ({columns})")
        # By the columns' names; Spark does it by their order.
        table = session.table(place.where).columns
        missing = [name for name in df.columns if find(table, name) is None]
        if missing:
            raise ValueError(f"the table {place.where} has no columns {', '.join(missing)}")
        ours = df.select(*(_column(df, name).alias(name) for name in table))
        ours.write.insertInto(place.where, overwrite=mode == "overwrite")


def _type_of(column: StructField) -> str:
    # Spark's own name for it may be that of another type, by spark.sql.timestampType.
    if isinstance(column.dataType, TimestampType):
        return "timestamp_ltz"
    return column.dataType.simpleString()


def _check_typed(place: Place) -> None:
    if place.form in _UNTYPED:
        raise ValueError(f"{place} is for input only: {place.form} keeps no types; take parquet")


@contextmanager
def _micros(session: SparkSession) -> Iterator[None]:
    """Write times to Parquet with statistics, by which a reader leaves out files.

    Spark's default type of times has none, and Iceberg and Delta Lake do not take it. No option of
    a write changes it, so it is set for the whole session meanwhile, unless it is set already.
    """
    name, is_set = "spark.sql.parquet.outputTimestampType", False
    # A platform may allow no job to set it.
    with suppress(Exception):
        if session.conf.get(name, None) is None:
            session.conf.set(name, "TIMESTAMP_MICROS")
            is_set = True
    try:
        yield
    finally:
        if is_set:
            session.conf.unset(name)


def _place(place: str | Place) -> Place:
    return place if isinstance(place, Place) else Place.parse(place)


def _text(session: SparkSession, place: Place, mode: str) -> DataFrame:
    """Return a table with each value as it is written: any type that Spark infers changes some.

    A key 007 is not 7, and the object {"a": 1} has no "b", though one in another row does.

    :param mode: Spark's mode for rows that it cannot read.
    """
    reader = session.read.format(place.form).options(**_UNTYPED[place.form])
    names = [name for name in reader.load(place.where).columns if name not in {UNREAD, PART}]
    schema = StructType([StructField(name, StringType()) for name in (*names, UNREAD)])
    reader = reader.option("columnNameOfCorruptRecord", UNREAD).option("mode", mode)
    table = reader.schema(schema).load(place.where)
    # In a row with a cell too few or too many, any cell may be that of another column.
    is_read = F.col(UNREAD).isNull()
    cells = (F.when(is_read, F.col(quoted(name))).alias(name) for name in names)
    return table.select(*cells, UNREAD)


def _column(table: DataFrame, name: str) -> Column:
    spelled = find(table.columns, name)
    return F.lit(None) if spelled is None else F.col(quoted(spelled))


def _is_of_files(session: SparkSession, name: str) -> bool:
    """Return whether a table is of plain files in Spark's own catalogue, which cannot merge."""
    rows = session.sql(f"DESCRIBE TABLE EXTENDED {name}").collect()
    described = {row["col_name"]: row["data_type"] or "" for row in rows}
    return described.get("Provider", "").lower() in {"hive", *_FILES}
