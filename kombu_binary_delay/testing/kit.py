"""The kit: a broker in this process, one clock that the test moves, and the workers it needs."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import datetime, timedelta
from typing import Any, Self
from unittest.mock import patch

import amqp
import kombu
from kombu.serialization import loads

from kombu_binary_delay import transport
from kombu_binary_delay.amendments.names import POSTPONED
from kombu_binary_delay.amendments.way_in import Dropped, on_dropped
from kombu_binary_delay.ladder.delay import TASK
from kombu_binary_delay.ladder.envelope import due_in
from kombu_binary_delay.ladder.identity import id_and_headers
from kombu_binary_delay.operate import judge_of
from kombu_binary_delay.routing import knowledge
from kombu_binary_delay.transport import TransportMixin
from kombu_binary_delay.wire.mechanism import TRANSPORT, mechanism_of

from .broker import HEADERS, Broker, Message, Queue
from .clock import EPOCH, Clock, as_datetime
from .errors import KitError
from .server import Session
from .socket import InProcess
from .values import Cancelled, Ran, Waiting

#: So many events without an end are a program that keeps itself busy.
MOST_EVENTS = 1_000_000
_current: list[Delayed] = []


class Delayed:
    """Runs delayed tasks in virtual time, without a broker.

    A context manager. Within it, time stands still, and each connection of this process to RabbitMQ
    is one to a broker in memory. Nothing runs until the test says so: :meth:`run`,
    :meth:`advance`, :meth:`advance_to`, :meth:`run_until_idle`. Then what is due runs, in the order
    of its due times, in a real worker of the app that has the task.

    :raises KitError: by all methods, if they cannot do what they are asked for.
    """

    def __init__(self) -> None:
        self._clock = Clock()
        self._stack = ExitStack()
        self._workers: dict[int, Any] = {}
        self._connections: list[Any] = []
        #: By its topology: a connection that delays on it.
        self._ladders: dict[Any, Any] = {}
        #: By the name of the task: the app that has sent it last.
        self._senders: dict[str, Any] = {}
        self._ran: list[Ran] = []
        self._cancelled: list[Cancelled] = []
        self._is_down = False
        self._duplicates = 0
        self._crash: Any = None

    # -- begin and end -------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if _current:
            raise KitError("another Delayed is in use: end it first")
        with ExitStack() as stack:
            self._clock.start()
            stack.callback(self._clock.stop)
            self._broker = Broker(self._clock.now())
            self._broker.on_enqueue.append(self._on_enqueue)
            kit = self

            def connect(connection: Any, host: str, *_: Any, **__: Any) -> InProcess:
                kit._connections.append(connection)
                return InProcess(host, kit._open)

            stack.enter_context(patch.object(amqp.Connection, "Transport", connect))
            # Nobody else deletes parts of this broker, and half a minute passes in each step.
            stack.enter_context(patch.object(knowledge, "LOOK_AGAIN", sys.maxsize))
            stack.enter_context(patch.object(transport, "LOOK_EVERY", math.inf))
            _current.append(self)
            stack.callback(_current.remove, self)
            _forget_connections()
            stack.callback(_forget_connections)
            self._watch(stack)
            stack.callback(self._stop_workers)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _open(self) -> Session:
        if self._is_down:
            raise ConnectionRefusedError("the broker is down, in a test's outage")
        return Session(self._broker, self._clock.now)

    def _watch(self, stack: ExitStack) -> None:
        """Note what Celery runs and discards."""
        try:
            from celery import Celery, Task, signals  # noqa: PLC0415 - plain Kombu programs have none
            from celery.worker import state  # noqa: PLC0415
        except ImportError:
            return
        send_task, senders = Celery.send_task, self._senders

        def noting(app: Any, name: str, *args: Any, **kwargs: Any) -> Any:
            senders[name] = app
            return send_task(app, name, *args, **kwargs)

        apply_async = Task.apply_async

        def checking(task: Any, *args: Any, **kwargs: Any) -> Any:
            if task.app.conf.task_always_eager:
                raise KitError(
                    f"task_always_eager of the app {task.app.main!r} runs tasks at once, without "
                    f"any delay: set it to False in tests that use this kit"
                )
            return apply_async(task, *args, **kwargs)

        stack.enter_context(patch.object(Celery, "send_task", noting))
        stack.enter_context(patch.object(Task, "apply_async", checking))
        for signal, listener in (
            (signals.task_postrun, self._on_run),
            (signals.task_revoked, self._on_revoked),
        ):
            signal.connect(listener, weak=False)
            stack.callback(signal.disconnect, listener)
        revoked = dict(state.revoked._data)  # noqa: SLF001 - has no public copy
        stack.callback(lambda: (state.revoked.clear(), state.revoked.update(revoked)))

    # -- time ----------------------------------------------------------------------------------

    @property
    def now(self) -> datetime:
        """The time, with a zone: UTC."""
        return as_datetime(self._clock.now())

    def advance(self, duration: timedelta | None = None, /, **units: float) -> None:
        """Advance the clock; what is due runs, at its time.

        :param units: as of :class:`datetime.timedelta`: ``minutes=59``.
        """
        passes = duration if duration is not None else timedelta(**units)
        if passes < timedelta(0):
            raise KitError(f"time does not go back, got {passes}; advance by 0 or more")
        self._run_until(self._clock.now() + passes // timedelta(microseconds=1))

    def advance_to(self, moment: datetime) -> None:
        """Advance the clock to a moment, a datetime with a zone; what is due runs, at its time."""
        if moment.tzinfo is None:
            raise KitError(f"{moment} has no zone; give one, such as datetime.UTC")
        until = (moment - EPOCH) // timedelta(microseconds=1)
        if until < self._clock.now():
            raise KitError(f"time does not go back: {moment} is before {self.now}")
        self._run_until(until)

    def run(self) -> None:
        """Run what is due now."""
        self._run_until(self._clock.now())

    def run_until_idle(self) -> None:
        """Advance the clock until nothing waits any more.

        :raises KitError: if that does not come, as with a task that sends itself again for ever.
        """
        self._run_until(None)

    def next_event(self) -> timedelta | None:
        """Return in how long something happens by itself next; None if nothing does."""
        event = self._next_event()
        return None if event is None else timedelta(microseconds=event - self._clock.now())

    def _run_until(self, end: int | None) -> None:
        for _ in range(MOST_EVENTS):
            self._run_now()
            event = self._next_event()
            if event is None or (end is not None and event > end):
                break
            self._clock.move_to(event)
            self._broker.run_until(event)
        else:
            raise KitError(f"more than {MOST_EVENTS} things happened: does a task repeat itself?")
        if end is not None:
            self._clock.move_to(end)
            self._broker.run_until(end)

    def _next_event(self) -> int | None:
        events = [self._broker.next_event()]
        events += [worker.timer.next_event() for worker in self._workers.values()]
        return min((event for event in events if event is not None), default=None)

    def _run_now(self) -> None:
        """Run what has come, and what comes of it at once."""
        self._broker.run_until(self._clock.now())
        while True:
            self._find_workers()
            ran = False
            for key, worker in list(self._workers.items()):
                try:
                    ran = worker.run() or ran
                except _ENDED:
                    # It has crashed, or an outage has ended its connection: the next one connects.
                    del self._workers[key]
                    worker.stop()
                    ran = True
            if not ran:
                return

    # -- workers -------------------------------------------------------------------------------

    def _find_workers(self) -> None:
        """Start a consumer of each queue in which a task has arrived."""
        if self._is_down:
            return
        for queue in list(self._broker.queues.values()):
            if not queue.ready or queue.consumers or queue.is_stream or self._ladder_of(queue.name):
                continue
            name = queue.ready[0].headers.get(TASK)
            app = self._app_with(name) if name else None
            if app is None:
                continue
            worker = self._workers.get(id(app))
            if worker is None:
                from .worker import Worker  # noqa: PLC0415 - needs Celery

                worker = self._workers[id(app)] = Worker(app)
            if not queue.consumers:
                worker.consume(queue.name)

    def _app_with(self, task: str) -> Any:
        """Return the app that has a task; None if none has it.

        :raises KitError: if that app does not use our transport, or there are several.
        """
        apps = [app for app in _apps() if task in app._tasks]  # noqa: SLF001 - configures none
        sender = self._senders.get(task)
        if sender in apps:
            apps = [sender]
        if len(apps) > 1:
            raise KitError(
                f"{len(apps)} Celery apps have the task {task}, and none of them has sent it: send "
                f"it by the app to test"
            )
        if apps and not _uses_transport(apps[0]):
            raise KitError(
                f"the app {apps[0].main!r}, which has the task {task}, does not use this "
                f"transport: set broker_transport = {TRANSPORT!r}"
            )
        return apps[0] if apps else None

    def _stop_workers(self) -> None:
        workers, self._workers = self._workers, {}
        for worker in workers.values():
            worker.stop()
        if self._crash is not None:
            self._crash.stop()

    def _on_run(self, **given: Any) -> None:
        if given["state"] is None:
            # Its worker was killed.
            return
        request = given["task"].request
        self._ran.append(
            Ran(
                given["task"].name,
                tuple(given["args"] or ()),
                given["kwargs"] or {},
                self.now,
                given["state"],
                given["retval"],
                request.retries or 0,
                given["task_id"],
            )
        )

    def _on_revoked(self, **given: Any) -> None:
        reason = "expired" if given["expired"] else "revoked"
        self._cancelled.append(Cancelled(given["sender"].name, given["request"].id, reason))

    # -- what a test looks at ------------------------------------------------------------------

    def waiting(self, task: Any = None, queue: str | None = None) -> list[Waiting]:
        """Return what waits and will be delivered, by due time.

        :param task: a task or its name; None for all.
        :param queue: the destination; None for all.
        """
        name = getattr(task, "name", task)
        with ExitStack() as stack:
            judges = self._judges(stack)
            seen = [
                self._waiting(topology, message, judges.get(topology))
                for topology, message in self._on_ladders()
            ]
        return sorted(
            (w for w in seen if w and name in (None, w.task) and queue in (None, w.queue)),
            key=lambda w: w.due,
        )

    def ran(self, task: Any = None) -> list[Ran]:
        """Return what ran, in order.

        :param task: a task or its name; None for all.
        """
        name = getattr(task, "name", task)
        return [ran for ran in self._ran if name in (None, ran.task)]

    def cancelled(self) -> list[Cancelled]:
        """Return what was taken back instead of delivered, in the order of the due times."""
        return list(self._cancelled)

    def parked(self) -> list[Waiting]:
        """Return what no queue took: the messages in parking queues."""
        queues = ((t, self._broker.queues.get(t.parking)) for t in self._topologies())
        parked = [self._waiting(t, m) for t, queue in queues if queue for m in queue.ready]
        return [message for message in parked if message is not None]

    def count(self, queue: str) -> int:
        """Return how many messages are ready in a queue; 0 if there is none."""
        messages = self._broker.queues.get(queue)
        return len(messages.ready) if messages is not None else 0

    def assert_waiting(self, *calls: Any) -> None:
        """Assert that these calls wait, among others."""
        waiting = self.waiting()
        missing = [expected for expected in calls if expected not in waiting]
        assert not missing, f"not waiting: {missing}; these are: {waiting}"  # noqa: S101 - its purpose

    def assert_no_more(self) -> None:
        """Assert that nothing waits."""
        waiting = self.waiting()
        assert not waiting, f"still waiting: {waiting}"  # noqa: S101 - its purpose

    def _on_ladders(self) -> Iterator[tuple[Any, Message]]:
        parking = {topology.parking for topology in self._topologies()}
        for queue in self._broker.queues.values():
            topology = self._ladder_of(queue.name)
            if topology and queue.name not in parking and not queue.is_stream:
                yield from ((topology, message) for message in queue.ready)

    def _waiting(
        self, topology: Any, message: Message, judge: Callable[[Any], Any] | None = None
    ) -> Waiting | None:
        """Return a message as its consumer will see it; None if it will not get it."""
        fate = judge(message.properties) if judge else None
        if fate is not None and fate.reason != POSTPONED:
            return None
        milliseconds = due_in(message.headers) or 0
        now = self._clock.now()
        due = max(milliseconds, fate.due if fate else 0) * 1000 or now
        router = self._ladders[topology].delay_mechanism.router
        (exchange, key), properties = router.received(
            topology.delivery, message.keys[0], message.properties, ""
        )
        headers = properties.get(HEADERS) or {}
        args, kwargs = _arguments(message)
        return Waiting(
            headers.get(TASK) or "",
            args,
            kwargs,
            (due - now) / 1e6,
            as_datetime(due),
            f"{exchange}:{key}" if exchange else key,
            id_and_headers(properties)[0],
            headers,
        )

    def _judges(self, stack: ExitStack) -> dict[Any, Any]:
        """Return what applies the amendments of each ladder, as long as its connection is open."""
        if not any(queue.is_stream and queue.ready for queue in self._broker.queues.values()):
            return {}
        clients = {topology: self._ladders[topology].client for topology in self._topologies()}
        # As Kombu's `clone` does, which one of a pool cannot.
        alike = {t: dict(client._info(resolve=False)) for t, client in clients.items()}  # noqa: SLF001
        return {
            topology: judge_of(stack.enter_context(kombu.Connection(**given)))
            for topology, given in alike.items()
        }

    def _topologies(self) -> list[Any]:
        for connection in self._connections:
            mechanism = mechanism_of(connection)
            if mechanism is not None:
                self._ladders.setdefault(mechanism.router.topology, connection)
        return list(self._ladders)

    def _ladder_of(self, queue: str) -> Any:
        """Return the topology of the ladder that a queue belongs to; None if it is a program's."""
        return next((t for t in self._topologies() if t.owns(queue)), None)

    # -- faults --------------------------------------------------------------------------------

    def duplicate_next(self) -> None:
        """Deliver the next message twice.

        Delivery is at least once: after a broker's crash, or a publish whose confirm was lost, a
        message may come twice.
        """
        self._duplicates += 1

    def crash_worker(self) -> None:
        """Kill the worker that begins the next task.

        With ``acks_late``, the broker gives the task to the next worker. Without, it is lost, as
        with every Celery worker that is killed.
        """
        from .worker import Crash  # noqa: PLC0415 - needs Celery

        self._crash = Crash(self._end_connections)

    def outage(self, **units: float) -> None:
        """Advance the clock with the broker down; what was due meanwhile runs late.

        Messages on the ladder are safe. Each goes on where it was when the broker is back.

        :param units: as of :class:`datetime.timedelta`: ``seconds=30``.
        """
        end = self._clock.now() + timedelta(**units) // timedelta(microseconds=1)
        self._run_now()
        self._is_down = True
        self._end_connections()
        self._stop_workers()
        self._clock.move_to(end)
        self._broker.now = end
        self._is_down = False

    def _end_connections(self) -> None:
        self._topologies()  # what the connections know goes with them
        for connection in self._connections:
            transport = connection._transport  # noqa: SLF001 - the property would connect
            if transport is not None and transport.connected:
                transport.cut()
        self._connections.clear()

    def _on_enqueue(self, queue: Queue, message: Message) -> None:
        if not self._duplicates or self._ladder_of(queue.name) or queue.is_stream:
            return
        if queue.name.endswith(".pidbox"):
            return
        self._duplicates -= 1
        queue.insert(message.copy())


def _arguments(message: Message) -> tuple[tuple[Any, ...], dict[str, Any]]:
    properties = message.properties
    body = loads(message.body, properties.get("content_type"), properties.get("content_encoding"))
    if TASK in message.headers:
        args, kwargs, _ = body
        return tuple(args), kwargs
    return (body,), {}


def _apps() -> list[Any]:
    try:
        from celery._state import _get_active_apps  # noqa: PLC0415 - plain Kombu programs have none
    except ImportError:
        return []
    return list(_get_active_apps())


def _uses_transport(app: Any) -> bool:
    return issubclass(app.connection_for_read().get_transport_cls(), TransportMixin)


def _forget_connections() -> None:
    """Empty the pools of Kombu and Celery: a pool may hold connections to another broker."""
    kombu.pools.reset()
    for app in _apps():
        pool = app._pool  # noqa: SLF001 - `pool` would make one
        if pool is not None:
            with suppress(Exception):
                pool.force_close_all()
            app._pool = None  # noqa: SLF001
        app.amqp._producer_pool = None  # noqa: SLF001


#: What ends a worker.
_ENDED: tuple[type[BaseException], ...] = (OSError,)
with suppress(ImportError):
    from celery.exceptions import WorkerShutdown

    _ENDED += (WorkerShutdown,)


@on_dropped
def _note_dropped(dropped: Dropped) -> None:
    for kit in _current:
        headers = dropped.properties.get(HEADERS) or {}
        noted = Cancelled(headers.get(TASK) or "", dropped.id, dropped.reason)
        kit._cancelled.append(noted)  # noqa: SLF001 - the kit's own
