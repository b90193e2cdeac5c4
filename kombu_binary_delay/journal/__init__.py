"""What really happened to delayed messages, as events beside the ladder; off unless asked for.

Three events: ``scheduled`` when a message is handed to the ladder, ``released`` when a consumer
gets it, ``executed`` when Celery has run its task. They are compact JSON, with ids, times and the
destination. Only ``scheduled`` has the arguments of a task, cut to a length, and it has none where
the setting ``journal_arguments`` is off. They go to a stream queue of RabbitMQ or, where the broker
has no streams, to a rotating local file.

* ``events``: what an event says. Pure.
* ``stream``, ``files``: the two places that events are written to.
* ``writer``: the journal of one connection.
* ``celery``: what Celery's signals say of executed tasks.

To write the journal must never harm what it is about: what goes wrong is logged, once. This package
must not import the transport or Celery.
"""

from .celery import follow_celery
from .stream import stream_name, stream_part
from .writer import Journal

__all__ = ["Journal", "follow_celery", "stream_name", "stream_part"]
