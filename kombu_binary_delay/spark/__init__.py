"""From a DataFrame to delayed Celery tasks, and back to proof; the extra ``[spark]`` brings Spark.

Nothing else in the package imports this, so that nobody pays for PySpark who does not use it.
"""
