"""How tables of the pipeline are written, so that several jobs can add to one path at once.

It must not touch a broker.
"""

from __future__ import annotations

from pyspark.sql import DataFrame

#: Hadoop's committer keeps what is not committed yet in a folder of the path, and the first job
#: that is done moves or deletes what is in it, whosever it is. So here each task moves its one file
#: in by itself, under a name that no other job has, and nobody deletes the folder.
_SHARED = {
    "mapreduce.fileoutputcommitter.algorithm.version": "2",
    "mapreduce.fileoutputcommitter.cleanup.skipped": "true",
    # The same of Hadoop's committers for S3, which would abort the uploads of others.
    "fs.s3a.committer.abort.pending.uploads": "false",
}


def append(df: DataFrame, path: str) -> None:
    """Add rows to a Parquet table, to which others may add at the same time.

    What a task has written is there as soon as that task is done.
    """
    df.write.options(**_SHARED).mode("append").parquet(path)
