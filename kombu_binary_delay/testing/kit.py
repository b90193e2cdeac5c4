"""What a test sees and asks of delayed tasks: one clock, the workers they need, and what they did.

:class:`Kit` is the same on the broker in memory, :mod:`.memory`, and on a real one, :mod:`.real`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Self
from unittest.mock import patch

import amqp
from kombu import Connection, pools
from kombu.serialization import loads

from kombu_binary_delay.amendments.names import POSTPONED
from kombu_binary_delay.ladder.delay import TASK
from kombu_binary_delay.ladder.envelope import due_in
from kombu_binary_delay.ladder.identity import id_and_headers
from kombu_binary_delay.operate import judge_of
from kombu_binary_delay.schedules.scheduler import Scheduler
from kombu_binary_delay.schedules.store import Store
from kombu_binary_delay.telemetry import Dropped, on_dropped
from kombu_binary_delay.transport import TransportMixin
from kombu_binary_delay.wire.mechanism import TRANSPORT, mechanism_of

from .broker import HEADERS, Message
from .clock import EPOCH, Clock, as_datetime
from .errors import KitError
from .values import Cancelled, Ran, Waiting

#: So many events without an end are a program that keeps itself busy.
MOST_EVENTS = 1_000_000
#: How long to wait for what can only have come already, in seconds.
AT_ONCE = 0.001
_current: list[Kit] = []


class Kit(ABC):
    """Runs delayed tasks when a test says so; a context manager.

    Within it, time stands still. Nothing runs until the test says so: :meth:`run`,
    :meth:`advance`, :meth:`advance_to`, :meth:`run_until_idle`. Then what is due runs, in the order
    of its due times, in a real worker of the app that has the task.

    :raises KitError: by all methods, if they cannot do what they are asked for.
    """

    def __init__(self) -> None:
        self._clock = Clock()
        self._stack = ExitStack()
        self._workers: dict[int, Any] = {}
        #: By the queue of its occurrences: the app that has looked at its schedules last.
        self._scheduled: dict[str, Any] = {}
        self._schedulers: dict[str, Scheduler] = {}
        self._connections: list[Any] = []
        #: By its topology: a connection that delays on it.
        self._ladders: dict[Any, Any] = {}
        #: By the name of a queue of a ladder: its topology.
        self._owners: dict[str, Any] = {}
        #: By the name of the task: the app that has sent it last.
        self._senders: dict[str, Any] = {}
        self._ran: list[Ran] = []
        self._cancelled: list[Cancelled] = []

    # -- begin and end -------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if _current:
            raise KitError("another Delayed is in use: end it first")
        with ExitStack() as stack:
            self._clock.start()
            stack.callback(self._clock.stop)
            _current.append(self)
            stack.callback(_current.remove, self)
            _forget_connections()
            stack.callback(_forget_connections)
            connect = amqp.Connection.Transport
            stack.enter_context(
                patch.object(amqp.Connection, "Transport", self._noting_connections(connect))
            )
            self._watch(stack)
            stack.callback(self._stop_workers)
            self._begin(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @abstractmethod
    def _begin(self, stack: ExitStack) -> None:
        """Do what this broker needs at the begin; the stack has what to do at the end."""

    def _noting_connections(self, connect: Callable[..., Any]) -> Callable[..., Any]:
        def noting(connection: Any, *args: Any, **kwargs: Any) -> Any:
            self._connections.append(connection)
            return self._connect(partial(connect, connection), *args, **kwargs)

        return noting

    @abstractmethod
    def _connect(self, connect: Callable[..., Any], host: str, *args: Any, **kwargs: Any) -> Any:
        """Return the socket of a connection.

        :param connect: py-amqp's own, which leads to a real broker.
        """

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
        made, scheduled = Store.__init__, self._scheduled

        def noting_schedules(store: Store, app: Any, *args: Any) -> None:
            made(store, app, *args)
            scheduled[store.names.queue] = app

        def checking(task: Any, *args: Any, **kwargs: Any) -> Any:
            if task.app.conf.task_always_eager:
                raise KitError(
                    f"task_always_eager of the app {task.app.main!r} runs tasks at once, without "
                    f"any delay: set it to False in tests that use this kit"
                )
            return apply_async(task, *args, **kwargs)

        stack.enter_context(patch.object(Celery, "send_task", noting))
        stack.enter_context(patch.object(Task, "apply_async", checking))
        stack.enter_context(patch.object(Store, "__init__", noting_schedules))
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
        self._run_now()
        for _ in range(MOST_EVENTS):
            event = self._next_event()
            if event is None or (end is not None and event > end):
                break
            self._pass(event)
            if self._has_work(event):
                self._run_now()
        else:
            raise KitError(f"more than {MOST_EVENTS} things happened: does a task repeat itself?")
        if end is not None:
            self._pass(end)

    def _next_event(self) -> int | None:
        return _first((self._next_of_broker(), self._next_here()))

    def _next_here(self) -> int | None:
        """Return when a worker or a scheduler has something to do next, as the broker's events."""
        events = [worker.timer.next_event() for worker in self._workers.values()]
        looks = [scheduler.next_look() for scheduler in self._schedulers.values()]
        return _first((*events, *(None if look is None else look * 1000 for look in looks)))

    def _has_work(self, _: int) -> bool:
        """Return whether there can be something to run at an event, which has just happened."""
        return True

    def _run_now(self) -> None:
        """Run what has come, and what comes of it at once."""
        while True:
            self._find_workers()
            ran = self._run_schedulers()
            if not (self._run_workers() or ran):
                return

    def _run_workers(self, wait: float = AT_ONCE) -> bool:
        """Run what has come to the workers; return whether there was anything.

        :param wait: how long each of them waits for more, in seconds.
        """
        ran = False
        for key, worker in list(self._workers.items()):
            try:
                ran = worker.run(wait) or ran
            except _ENDED:
                # It has crashed, or an outage has ended its connection: the next one connects.
                del self._workers[key]
                worker.stop()
                ran = True
        return ran

    @abstractmethod
    def _next_of_broker(self) -> int | None:
        """Return when a message moves by itself next, in microseconds since the epoch."""

    @abstractmethod
    def _pass(self, moment: int) -> None:
        """Move time to a moment, in microseconds since the epoch."""

    # -- workers -------------------------------------------------------------------------------

    @abstractmethod
    def _find_workers(self) -> None:
        """Start a consumer of each queue in which a task has arrived."""

    def _worker_of(self, app: Any) -> Any:
        worker = self._workers.get(id(app))
        if worker is None:
            from .worker import Worker  # noqa: PLC0415 - needs Celery

            worker = self._workers[id(app)] = Worker(app)
        return worker

    @abstractmethod
    def _has(self, queue: str) -> bool:
        """Return whether a queue of schedules exists, and can be consumed."""

    def _run_schedulers(self) -> bool:
        """Send what schedules are due; return whether there was any."""
        ran = False
        for queue, app in list(self._scheduled.items()):
            if not self._has(queue):
                continue
            try:
                scheduler = self._schedulers.get(queue)
                if scheduler is None:
                    scheduler = Scheduler(app, app.connection_for_write())
                    self._schedulers[queue] = scheduler
                    scheduler.begin()
                ran = scheduler.step(AT_ONCE) or ran
            except _ENDED:
                # Its worker was killed, or an outage has ended its connection.
                scheduler = self._schedulers.pop(queue, None)
                if scheduler is not None:
                    scheduler.leave()
                ran = True
        return ran

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
        schedulers, self._schedulers = self._schedulers, {}
        for scheduler in schedulers.values():
            with suppress(*_ENDED):
                scheduler.end()

    def _on_run(self, **given: Any) -> None:
        if given["state"] is None:
            # Its worker was killed.
            return
        request, result = given["task"].request, given["retval"]
        if isinstance(result, BaseException):
            # Its frames would be kept, with all that they hold.
            result = result.with_traceback(None)
        self._ran.append(
            Ran(
                given["task"].name,
                tuple(given["args"] or ()),
                given["kwargs"] or {},
                self.now,
                given["state"],
                result,
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
        parked = [
            self._waiting(topology, message)
            for topology in self._topologies()
            for message in self._messages_in(topology.parking)
        ]
        return [message for message in parked if message is not None]

    @abstractmethod
    def count(self, queue: str) -> int:
        """Return how many messages are ready in a queue; 0 if there is none."""

    def assert_waiting(self, *calls: Any) -> None:
        """Assert that these calls wait, among others."""
        waiting = self.waiting()
        missing = [expected for expected in calls if expected not in waiting]
        assert not missing, f"not waiting: {missing}; these are: {waiting}"  # noqa: S101 - its purpose

    def assert_no_more(self) -> None:
        """Assert that nothing waits."""
        waiting = self.waiting()
        assert not waiting, f"still waiting: {waiting}"  # noqa: S101 - its purpose

    @abstractmethod
    def _on_ladders(self) -> Iterable[tuple[Any, Message]]:
        """Return what waits, each with the topology of its ladder."""

    @abstractmethod
    def _messages_in(self, queue: str) -> Iterable[Message]:
        """Return the messages in a queue."""

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
        (exchange, key), properties = router.deliveries.received(
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
        return {
            topology: judge_of(stack.enter_context(self._alike(topology)))
            for topology in self._topologies()
        }

    def _alike(self, topology: Any) -> Any:
        """Return a connection like one that delays on a ladder."""
        # As Kombu's `clone` does, which one of a pool cannot.
        return Connection(**dict(self._ladders[topology].client._info(resolve=False)))  # noqa: SLF001

    def _topologies(self) -> list[Any]:
        for connection in self._connections:
            mechanism = mechanism_of(connection)
            if mechanism is not None:
                self._ladders.setdefault(mechanism.router.topology, connection)
        return list(self._ladders)

    def _ladder_of(self, queue: str) -> Any:
        """Return the topology of the ladder that a queue belongs to; None if it is a program's."""
        topology = self._owners.get(queue)
        if topology is None:
            topology = next((t for t in self._topologies() if t.owns(queue)), None)
            if topology is not None:
                self._owners[queue] = topology
        return topology


def _first(events: Iterable[int | None]) -> int | None:
    return min((event for event in events if event is not None), default=None)


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
    pools.reset()
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
    # What a worker has discarded is noted as revoked.
    for kit in () if dropped.by_worker else _current:
        headers = dropped.properties.get(HEADERS) or {}
        noted = Cancelled(headers.get(TASK) or "", dropped.id, dropped.reason)
        kit._cancelled.append(noted)  # noqa: SLF001 - the kit's own
