"""Record what happens to delayed messages as events; off by default.

There are three events: ``scheduled`` when a message is published to the ladder, ``released`` when a
consumer gets it, and ``executed`` when Celery has run its task. They are compact JSON, with ids,
times and the destination. Only ``scheduled`` has the arguments of a task, cut to a length; the
setting ``journal_arguments`` turns them off. Events go to a stream on the broker or, if the broker
has no streams, to a rotating local file.

* ``events``: the content of events. Pure.
* ``stream``, ``files``: the two places for events.
* ``writer``: the journal of one connection.

Events of executed tasks, from Celery's signals, are in :mod:`kombu_binary_delay.celery_side`.

The journal must never harm the messages: a failure is only logged. This package must not import the
transport or Celery.
"""

from .stream import stream_name, stream_part
from .writer import Journal

__all__ = ["Journal", "stream_name", "stream_part"]
