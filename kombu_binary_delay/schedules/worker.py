"""Runs the scheduler in a thread of each Celery worker whose app has a ``beat_schedule``.

It also marks the runs that allow no other beside them.

The transport calls :func:`take_part` when it is made. This module must not import Celery: a Kombu
program may not have it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from contextlib import suppress
from typing import Any

import amqp
from amqp.exceptions import AccessRefused, ResourceLocked
from kombu.exceptions import KombuError
from kombu.log import get_logger

from kombu_binary_delay.errors import ScheduleError
from kombu_binary_delay.wire.mechanism import delays

from .scheduler import RUN, Scheduler

logger = get_logger(__name__)

#: How often to look for schedules where there are none, and how long to wait after an error, at
#: first and at last, in seconds.
_NONE_YET, _SHORTEST, _LONGEST = 30.0, 0.5, 8.0
#: The interval of the connection's heartbeats: a worker that hangs is replaced after two.
_HEARTBEAT = 10
#: How long a worker that stops waits for its scheduler, in seconds.
_LEAVING = 5.0

_threads: dict[int, _Thread] = {}
#: The connections of schedulers. A child process must not keep them open when its worker dies.
_connections: weakref.WeakSet[Any] = weakref.WeakSet()


def take_part() -> None:
    """Run a scheduler in Celery's worker in this process, if there is one."""
    signals = sys.modules.get("celery.signals")
    if signals is not None:
        for signal, handler in (
            (signals.worker_ready, _begin),
            (signals.worker_shutting_down, _end),
            (signals.task_prerun, _hold),
            (signals.task_postrun, _release),
        ):
            signal.connect(handler, dispatch_uid="binary-delay-schedules")


class _Thread(threading.Thread):
    def __init__(self, app: Any) -> None:
        super().__init__(name="binary-delay-schedules", daemon=True)
        self._app = app
        self.stopped = threading.Event()

    def run(self) -> None:
        """Run a scheduler after the other, as connections end."""
        said, rest = "", _SHORTEST
        while not self.stopped.is_set():
            try:
                with self._app.connection_for_write(heartbeat=_HEARTBEAT) as client:
                    client.ensure_connection(max_retries=1)
                    scheduler = Scheduler(self._app, client)
                    if scheduler.begin():
                        _connections.add(client.connection)
                        said, rest = "", _SHORTEST
                        self._follow(scheduler, client)
                    else:
                        rest = _NONE_YET
            except ScheduleError as exc:
                # Of the settings or the broker.
                logger.debug("this worker has no scheduler: %s", exc)
                return
            except (OSError, amqp.AMQPError, KombuError) as exc:
                if isinstance(exc, AccessRefused) or isinstance(exc.__cause__, AccessRefused):
                    logger.warning("this worker has no scheduler: %s", exc)
                    return
                rest = min(rest * 2, _LONGEST)
                if str(exc) != said:
                    logger.warning("the scheduler begins again in %g s: %s", rest, exc)
                said = str(exc)
            except Exception:
                rest = _NONE_YET
                logger.exception("the scheduler begins again in %g s", rest)
            self.stopped.wait(rest)

    def _follow(self, scheduler: Scheduler, client: Any) -> None:
        beat_at = 0.0
        while not self.stopped.is_set():
            scheduler.step(0.5)
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + _HEARTBEAT / 4
                client.heartbeat_check(rate=4)
        scheduler.end()


def _begin(sender: Any = None, **_: Any) -> None:
    app = getattr(sender, "app", None)
    connection = getattr(sender, "connection", None)
    if app is None or not delays(getattr(connection, "transport", None)):
        return
    if not app.conf.beat_schedule:
        return
    thread = _threads[id(app)] = _Thread(app)
    thread.start()


def _end(**_: Any) -> None:
    for thread in _threads.values():
        thread.stopped.set()
    for thread in _threads.values():
        thread.join(_LEAVING)
    _threads.clear()


def _close_in_child() -> None:
    for connection in list(_connections):
        with suppress(Exception):
            os.close(connection.transport.sock.detach())
    _connections.clear()
    _threads.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


# -- one run at a time -------------------------------------------------------------------------


def _hold(task: Any = None, **_: Any) -> None:
    """Hold the queue of a run that allows no other, as long as it and its process live."""
    run = (getattr(task.request, "headers", None) or {}).get(RUN)
    queue = run.get("holds") if isinstance(run, dict) else None
    if not isinstance(queue, str):
        return
    try:
        client = task.app.connection_for_write()
        task.request.binary_delay_held = client
        client.default_channel.queue_declare(
            queue=queue, exclusive=True, auto_delete=False, arguments={"x-max-length": 0}
        )
    except ResourceLocked:
        logger.warning("%s runs beside its last run, which was taken just before", task.name)
    except (OSError, amqp.AMQPError, KombuError) as exc:
        logger.warning("%s runs, and the next run may overlap it: %s", task.name, exc)


def _release(task: Any = None, **_: Any) -> None:
    client = getattr(task.request, "binary_delay_held", None)
    if client is not None:
        with suppress(OSError, amqp.AMQPError):
            client.close()
