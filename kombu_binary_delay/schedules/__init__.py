"""Recurring tasks that wait in the broker: Celery's ``beat_schedule`` without beat.

* :mod:`.when`: when a schedule is due, by Celery's own crontab; as data.
* :mod:`.definitions`: the schedules of an app, and what an ``apply`` changes.
* :mod:`.series`: what follows from an occurrence that has arrived.
* :mod:`.listing`: how far each schedule has come, as the broker says.
* :mod:`.store`: the streams and the queue on the broker.
* :mod:`.scheduler`: what each worker does; :mod:`.worker` runs it in a thread.
* :mod:`.api`: the functions that a program calls.
"""

from .api import apply, listed, pause, remove, resume, trigger
from .definitions import Applied
from .listing import Listed, Schedules

__all__ = [
    "Applied",
    "Listed",
    "Schedules",
    "apply",
    "listed",
    "pause",
    "remove",
    "resume",
    "trigger",
]
