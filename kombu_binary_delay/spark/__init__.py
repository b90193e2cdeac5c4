"""Publish DataFrames as delayed Celery tasks, and audit them. Needs the extra ``[spark]``.

Nothing else in the package imports this, so you need PySpark only if you use it.
"""
