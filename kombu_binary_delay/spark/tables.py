"""Write the pipeline's tables, so that several jobs can append to one path at once.

This module must not touch a broker.
"""

from __future__ import annotations

from pyspark.sql import DataFrame

#: Hadoop's committer keeps uncommitted files in a folder of the path, and the first job that ends
#: moves or deletes all that is in it, also the files of other jobs. So each task moves its file
#: itself, under a name that no other job has, and no job deletes the folder.
_SHARED = {
    "mapreduce.fileoutputcommitter.algorithm.version": "2",
    "mapreduce.fileoutputcommitter.cleanup.skipped": "true",
    # The same of Hadoop's committers for S3, which would abort the uploads of others.
    "fs.s3a.committer.abort.pending.uploads": "false",
}


def append(df: DataFrame, path: str) -> None:
    """Append rows to a Parquet table; other jobs may append at the same time.

    A Spark task's rows can be read as soon as that task has ended.
    """
    df.write.options(**_SHARED).mode("append").parquet(path)
