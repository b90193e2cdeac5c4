"""A broker in this process, in virtual time."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from itertools import chain
from typing import Any
from unittest.mock import patch

from kombu_binary_delay import transport
from kombu_binary_delay.amendments import reading
from kombu_binary_delay.ladder.delay import TASK
from kombu_binary_delay.routing import knowledge
from kombu_binary_delay.routing.commands import names_in

from .broker import Broker, Message, Queue
from .kit import Kit
from .server import Session
from .socket import InProcess

#: The broker of the kit before, and what its ladders consist of, if there was one.
_kept: list[tuple[Broker, dict[Any, list[str]]]] = []


class Delayed(Kit):
    """Runs delayed tasks in virtual time, without a broker.

    A context manager. Within it, time stands still, and each connection of this process to RabbitMQ
    is one to a broker in memory. Nothing runs until the test says so: :meth:`run`,
    :meth:`advance`, :meth:`advance_to`, :meth:`run_until_idle`. Then what is due runs, in the order
    of its due times, in a real worker of the app that has the task.

    :raises KitError: by all methods, if they cannot do what they are asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_down = False
        #: Whether something has entered a queue of a program, or a stream.
        self._has_arrived = False
        self._duplicates = 0
        self._crash: Any = None

    def _begin(self, stack: ExitStack) -> None:
        self._broker = Broker(self._clock.now())
        # As on a broker that stays: to declare a ladder takes longer than all else in a test.
        if _kept:
            before, ladders = _kept[0]
            # With the mirrors of exchanges, but not those exchanges and queues, which are no more.
            self._broker.inherit(before, chain.from_iterable(ladders.values()))
        stack.callback(self._keep)
        self._broker.on_enqueue.append(self._on_enqueue)
        # Half a minute passes in each step, and nothing changes on this broker unseen.
        self._heard: dict[Any, int] = defaultdict(int)
        for module, name, value in (
            (knowledge, "LOOK_AGAIN", sys.maxsize),
            (transport, "LOOK_EVERY", math.inf),
            (reading, "LOOK_AGAIN", math.inf),
            (reading, "_LOOK_EVERY", math.inf),
            (reading, "_heard", self._heard),
        ):
            stack.enter_context(patch.object(module, name, value))
        with suppress(ImportError):
            from .worker import copying_code_once  # noqa: PLC0415 - needs Celery

            stack.enter_context(copying_code_once())

    def _keep(self) -> None:
        """Leave the broker to the next kit."""
        ladders = _kept[0][1] if _kept else {}
        for topology in self._topologies():
            if topology not in ladders:
                exchanges, queues = names_in(topology.whole)
                ladders[topology] = [*exchanges, *queues]
        _kept[:] = [(self._broker, ladders)]

    def _connect(self, connect: Callable[..., Any], host: str, *_: Any, **__: Any) -> InProcess:  # noqa: ARG002
        return InProcess(host, self._open)

    def _open(self) -> Session:
        if self._is_down:
            raise ConnectionRefusedError("the broker is down, in a test's outage")
        return Session(self._broker, self._clock.now)

    # -- time and workers ----------------------------------------------------------------------

    def _next_of_broker(self) -> int | None:
        return self._broker.next_event()

    def _pass(self, moment: int) -> None:
        self._clock.move_to(moment)
        self._broker.run_until(moment)

    def _run_now(self) -> None:
        self._broker.run_until(self._clock.now())
        super()._run_now()
        self._has_arrived = False

    def _has_work(self, event: int) -> bool:
        # What moves from level to level is nobody's yet.
        here = self._next_here()
        return self._has_arrived or (here is not None and here <= event)

    def _find_workers(self) -> None:
        if self._is_down:
            return
        for queue in list(self._broker.queues.values()):
            if not queue.ready or queue.consumers or queue.is_stream or self._ladder_of(queue.name):
                continue
            name = queue.ready[0].headers.get(TASK)
            app = self._app_with(name) if name else None
            if app is None:
                continue
            worker = self._worker_of(app)
            if not queue.consumers:
                worker.consume(queue.name)

    def _has(self, queue: str) -> bool:
        return not self._is_down and queue in self._broker.queues

    def _stop_workers(self) -> None:
        super()._stop_workers()
        if self._crash is not None:
            self._crash.stop()

    # -- what a test looks at ------------------------------------------------------------------

    def count(self, queue: str) -> int:
        """Return how many messages are ready in a queue; 0 if there is none."""
        return len(self._messages_in(queue))

    def _messages_in(self, queue: str) -> list[Message]:
        existing = self._broker.queues.get(queue)
        return list(existing.ready) if existing is not None else []

    def _on_ladders(self) -> Iterator[tuple[Any, Message]]:
        parking = {topology.parking for topology in self._topologies()}
        for queue in self._broker.queues.values():
            topology = self._ladder_of(queue.name)
            if topology and queue.name not in parking and not queue.is_stream:
                yield from ((topology, message) for message in queue.ready)

    def _judges(self, stack: ExitStack) -> dict[Any, Any]:
        if not any(queue.is_stream and queue.ready for queue in self._broker.queues.values()):
            return {}
        return super()._judges(stack)

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
        if queue.is_stream and len(queue.ready) == 1:
            # Its readers may not know yet that it exists.
            for place in self._heard:
                self._heard[place] += 1
        is_of_ladder = self._ladder_of(queue.name) is not None
        if not is_of_ladder or queue.is_stream or queue.consumers:
            self._has_arrived = True
        if not self._duplicates or is_of_ladder or queue.is_stream:
            return
        if queue.name.endswith(".pidbox"):
            return
        self._duplicates -= 1
        queue.insert(message.copy())
