"""A real Celery worker in this process, which runs only when it is told to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from heapq import heappop, heappush
from itertools import count
from typing import Any
from unittest.mock import patch

from billiard.einfo import Traceback
from celery import signals
from celery._state import (
    _set_current_app,
    _set_task_join_will_block,
    get_current_app,
    task_join_will_block,
)
from celery.exceptions import WorkerShutdown
from celery.worker import WorkController
from celery.worker.consumer import Consumer

from .clock import now
from .socket import InProcess


class Entry:
    """A call that a worker has put off."""

    def __init__(self, function: Callable[..., object], arguments: Any, keywords: Any) -> None:
        self.function, self.arguments, self.keywords = function, arguments, keywords
        self.canceled = False

    def cancel(self) -> None:
        """Never call it."""
        self.canceled = True


class Timer:
    """The worker's timer, by the clock of the test; called as Celery calls its own."""

    def __init__(self, *_: Any, **__: Any) -> None:
        #: By due time, in microseconds since the epoch.
        self.queue: list[tuple[int, int, Entry]] = []
        self._numbers = count()

    def call_at(self, _: float, fun: Any, args: Any, **__: Any) -> Entry:
        """Call a function with a request at its ETA.

        Celery gives the time by a clock that does not stand still.
        """
        return self._enter(args[0].eta.timestamp(), fun, args, {})

    def call_after(
        self, secs: float, fun: Any, args: Any = (), kwargs: Any = None, **_: Any
    ) -> Entry:
        """Call a function in some seconds."""
        return self._enter(now() / 1e6 + secs, fun, args, kwargs or {})

    def _enter(self, at: float, *call: Any) -> Entry:
        entry = Entry(*call)
        heappush(self.queue, (round(at * 1e6), next(self._numbers), entry))
        return entry

    def call_repeatedly(self, *args: Any, **_: Any) -> Entry:
        """Do nothing: what Celery repeats (heartbeats, statistics) needs no test's time."""
        return Entry(args[1], (), {})

    def next_event(self) -> int | None:
        """Return when the next call is due, in microseconds since the epoch."""
        while self.queue and self.queue[0][2].canceled:
            heappop(self.queue)
        return self.queue[0][0] if self.queue else None

    def run(self) -> bool:
        """Call what is due; return whether there was anything."""
        called = False
        while self.queue and self.queue[0][0] <= now():
            entry = heappop(self.queue)[2]
            if not entry.canceled:
                entry.function(*entry.arguments, **entry.keywords)
                called = True
        return called

    def clear(self) -> None:
        """Forget all calls."""
        self.queue.clear()

    def cancel(self, entry: Entry) -> None:
        """Never call an entry."""
        entry.cancel()

    def start(self) -> None:
        """Do nothing: it has no thread."""

    stop = ensure_started = start


class _Consumer(Consumer):
    """Celery's consumer, with a loop that only prepares it."""

    def call_soon(self, p: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function now: as with the pool ``prefork``, an early ack is before the task."""
        return p(*args, **kwargs)

    def loop(self, _: Any, __: Any, consumer: Any, *___: Any) -> None:
        """Begin to consume, as the first lines of Celery's own loops do."""
        consumer.on_message = self.create_task_handler()
        consumer.consume()
        self.on_ready()


class Worker:
    """One worker of an app, with the pool ``solo``."""

    def __init__(self, app: Any) -> None:
        self.app = app
        with self._as_current():
            self._controller = WorkController(
                app=app,
                pool_cls="solo",
                concurrency=1,
                consumer_cls=_Consumer,
                timer_cls=Timer,
                use_eventloop=False,
                without_mingle=True,
                without_gossip=True,
                without_heartbeat=True,
                task_events=False,
            )
            self._controller.pool.start()
            self._consumer = self._controller.consumer
            self._consumer.blueprint.start(self._consumer)
        self.timer: Timer = self._controller.timer

    @property
    def connection(self) -> Any:
        """The connection that it consumes on."""
        return self._consumer.connection

    @contextmanager
    def _as_current(self) -> Iterator[None]:
        before, blocks = get_current_app(), task_join_will_block()
        _set_current_app(self.app)
        _set_task_join_will_block(True)  # noqa: FBT003 - Celery's own
        try:
            yield
        finally:
            _set_current_app(before)
            # A test may wait for results; only a task may not.
            _set_task_join_will_block(blocks)

    def consume(self, queue: str) -> None:
        """Consume a queue, too."""
        self._consumer.add_task_queue(queue)

    def run(self, wait: float) -> bool:
        """Run what has come; return whether there was anything.

        :param wait: how long to wait for more, in seconds.
        """
        ran = False
        with self._as_current():
            while True:
                self._consumer.perform_pending_operations()
                # What is due at once needs no more room.
                ran = self.timer.run() or ran
                qos = self._consumer.qos
                if qos.prev != qos.value:
                    qos.update()
                if self._is_quiet():
                    break
                try:
                    self.connection.drain_events(timeout=wait)
                except TimeoutError:
                    break
                ran = True
            return self.timer.run() or ran

    def _is_quiet(self) -> bool:
        """Return whether to read would only run into the time limit."""
        connection = self.connection.connection
        transport = getattr(connection, "transport", None)
        return (
            isinstance(transport, InProcess)
            and transport.is_quiet
            and not connection.frame_buffer.waiting
        )

    def stop(self) -> None:
        """Close the worker's connections."""
        with suppress(Exception), self._as_current():
            self._consumer.shutdown()


@contextmanager
def copying_code_once() -> Iterator[None]:
    """Make Celery copy the code of a function for its first traceback, and not for each.

    That is a quarter of what a retry costs, and code never changes.
    """
    copies: dict[int, tuple[Any, Any]] = {}
    copy_code = Traceback.Frame.Code

    def copy(code: Any) -> Any:
        # By its identity: code that is equal may stand elsewhere. It is kept, so its id is.
        kept = copies.get(id(code))
        if kept is None:
            kept = copies[id(code)] = code, copy_code(code)
        return kept[1]

    with patch.object(Traceback.Frame, "Code", staticmethod(copy)):
        yield


class Crash:
    """Ends the worker that begins the next task, as a kill would: nothing is acknowledged after."""

    def __init__(self, end: Callable[[], object]) -> None:
        self._end = end
        signals.task_prerun.connect(self._on_prerun, weak=False)

    def _on_prerun(self, **_: Any) -> None:
        self.stop()
        self._end()
        raise WorkerShutdown

    def stop(self) -> None:
        """Crash no more."""
        signals.task_prerun.disconnect(self._on_prerun)
