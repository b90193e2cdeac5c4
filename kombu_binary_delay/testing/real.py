"""The same tests on the app's own broker, in real time.

The clock still stands while the test itself runs. To advance it takes as much real time, and at the
due time of a message it stands again until that message has come. So the runs of a test, and their
times, are those of the broker in memory, unless the real one does something else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, NoReturn
from unittest.mock import patch

import amqp
from amqp import spec
from amqp.abstract_channel import AbstractChannel
from amqp.exceptions import NotFound

from kombu_binary_delay.amendments.api import cancel
from kombu_binary_delay.channel import ChannelMixin
from kombu_binary_delay.ladder.delay import TASK
from kombu_binary_delay.ladder.envelope import due_in
from kombu_binary_delay.ladder.identity import id_and_headers
from kombu_binary_delay.publishing.frames import Messages
from kombu_binary_delay.wire.mechanism import mechanism_of

from .broker import Message
from .clock import Clock, as_datetime
from .errors import KitError
from .kit import Kit

#: The most that a test advances at once, in seconds: it waits as long.
LONGEST = 60
#: How late a task may come before that is an error, in seconds.
PATIENCE = 10.0
#: How late another message may come, which nobody here may ever consume, in seconds.
PATIENCE_FOR_OTHERS = 1.0
#: How long to wait for a worker's next message before another worker has its turn, in seconds.
_TURN = 0.01


@dataclass(eq=False)
class _Sent:
    """A message that this process has sent, and that has not run yet.

    :param topology: of the ladder of its connection.
    :param due: in microseconds since the epoch.
    """

    message: Message
    topology: Any
    due: int
    has_come: bool = False

    @property
    def task(self) -> str:
        """The task's name; empty if it is another message."""
        return self.message.headers.get(TASK) or ""

    @property
    def mark(self) -> tuple[Any, ...]:
        """What tells it from others."""
        return _mark(self.message)


class DelayedOnBroker(Kit):
    """Runs delayed tasks on the broker of the app's own URL, in real time.

    A context manager with the methods of :class:`.Delayed`, for tests whose delays are seconds. It
    knows what this process has sent, and runs the app's worker in this process. At its end, it
    cancels what still waits.

    :raises KitError: by all methods, if a task does not come in time, or if they cannot do what
        they are asked for on a real broker.
    """

    def __init__(self) -> None:
        super().__init__()
        self._clock = Clock(is_real=True)
        self._sent: list[_Sent] = []
        self._marks: set[Any] = set()

    def _begin(self, stack: ExitStack) -> None:
        send, add, dispatch = (
            AbstractChannel.send_method,
            Messages.add,
            ChannelMixin.dispatch_method,
        )

        def sending(channel: Any, sig: Any, *args: Any, **kwargs: Any) -> Any:
            result = send(channel, sig, *args, **kwargs)
            if sig == spec.Basic.Publish:
                _, (_, exchange, key, *_), content = args
                self._note(channel.connection, content.body, content.properties, exchange, key)
            return result

        def adding(messages: Any, *args: Any) -> None:
            add(messages, *args)
            self._note(messages._connection, *args[:4])  # noqa: SLF001 - has no public one

        def dispatching(channel: Any, sig: Any, payload: Any, content: Any) -> Any:
            if sig in {spec.Basic.Deliver, spec.Basic.GetOk}:
                self._note_arrival(content.body, content.properties)
            return dispatch(channel, sig, payload, content)

        stack.callback(self._cancel_all)
        stack.enter_context(patch.object(AbstractChannel, "send_method", sending))
        stack.enter_context(patch.object(Messages, "add", adding))
        stack.enter_context(patch.object(ChannelMixin, "dispatch_method", dispatching))

    def _connect(self, connect: Callable[..., Any], host: str, *args: Any, **kwargs: Any) -> Any:
        return connect(host, *args, **kwargs)

    # -- what was sent, and has come -----------------------------------------------------------

    def _note(
        self, connection: Any, body: Any, properties: dict[str, Any], exchange: str, key: str
    ) -> None:
        message = Message(_bytes(body), properties, exchange, [key])
        due, mechanism = due_in(message.headers), mechanism_of(connection)
        if mechanism is None or (due is None and TASK not in message.headers):
            return
        sent = _Sent(message, mechanism.router.topology, max((due or 0) * 1000, self._clock.now()))
        self._marks.add(sent.mark)
        # Kombu may have sent it once more, on another connection.
        if not id_and_headers(properties)[0] or sent.mark not in [
            s.mark for s in self._outstanding()
        ]:
            self._sent.append(sent)

    def _note_arrival(self, body: Any, properties: dict[str, Any]) -> None:
        mark = _mark(Message(_bytes(body), properties, "", []))
        for sent in self._outstanding():
            if sent.mark == mark:
                sent.has_come = True
                return

    def _outstanding(self) -> list[_Sent]:
        return [sent for sent in self._sent if not sent.has_come]

    def _cancel_all(self) -> None:
        """Cancel what waits, so that it does not run in a later test."""
        now = self._clock.now()
        for sent in self._outstanding():
            name, _ = id_and_headers(sent.message.properties)
            if name:
                eta = as_datetime(sent.due) if sent.due > now else None
                with self._alike(sent.topology) as connection:
                    cancel(name, eta=eta, connection=connection)

    # -- time and workers ----------------------------------------------------------------------

    def _run_until(self, end: int | None) -> None:
        if end is not None:
            self._check(end)
        super()._run_until(end)

    def _next_of_broker(self) -> int | None:
        return min((sent.due for sent in self._outstanding()), default=None)

    def _pass(self, moment: int) -> None:
        self._check(moment)
        end = self._clock.real() + (moment - self._clock.now()) / 1e6
        while (left := end - self._clock.real()) > 0:
            self._run_workers_for(min(left, _TURN))
        self._clock.move_to(moment)

    def _run_now(self) -> None:
        """Run what is due, as soon as it comes."""
        begin, now, looked = self._clock.real(), self._clock.now(), 0.0
        super()._run_now()
        while late := [sent for sent in self._outstanding() if sent.due <= now]:
            waited = self._clock.real() - begin
            if waited - looked > PATIENCE_FOR_OTHERS:
                # Not at each turn: RabbitMQ counts how often a parked message is given back.
                looked = waited
                self.parked()
                for sent in late:
                    # Nobody may consume it here.
                    sent.has_come = sent.has_come or not self._app_of(sent)
            if waited > PATIENCE and not all(sent.has_come for sent in late):
                raise KitError(
                    f"{late[0].task} has not come within {PATIENCE:g} s of its due time: does "
                    f"another worker consume its queue, or does its app not know that queue?"
                )
            self._run_workers_for(_TURN)
            super()._run_now()
        self._sent = [sent for sent in self._sent if not sent.has_come or sent.due > now]

    def _run_workers_for(self, wait: float) -> None:
        if self._workers:
            self._run_workers(wait)
        else:
            time.sleep(wait)

    def _find_workers(self) -> None:
        for app in filter(None, {self._app_of(sent) for sent in self._sent}):
            worker = self._worker_of(app)
            for queue in list(app.amqp.queues):
                worker.consume(queue)

    def _has(self, _: str) -> bool:
        raise KitError("schedules run in memory only: run this test without a broker")

    def _app_of(self, sent: _Sent) -> Any:
        return self._app_with(sent.task) if sent.task else None

    def _check(self, moment: int) -> None:
        if (ahead := (moment - self._clock.now()) / 1e6) > LONGEST:
            raise KitError(
                f"on a real broker, to advance by {ahead:g} s takes as long: let this test wait "
                f"for at most {LONGEST} s at once, or run it without a broker"
            )

    # -- what a test looks at ------------------------------------------------------------------

    def count(self, queue: str) -> int:
        """Return how many messages are ready in a queue; 0 if there is none."""
        for topology in self._topologies():
            with self._alike(topology) as connection, suppress(NotFound):
                return int(connection.channel().queue_declare(queue, passive=True).message_count)
        return 0

    def _on_ladders(self) -> Iterator[tuple[Any, Message]]:
        for sent in self._sent:
            if due_in(sent.message.headers) is not None:
                yield sent.topology, sent.message

    def _messages_in(self, queue: str) -> list[Message]:
        """Return the messages of this process in a queue."""
        messages = []
        topology = next(t for t in self._topologies() if t.parking == queue)
        # They go back to the queue when the connection ends.
        with self._alike(topology) as connection, suppress(NotFound):
            channel = connection.channel()
            while (got := amqp.Channel.basic_get(channel, queue)) is not None:
                keys = [got.delivery_info["routing_key"]]
                message = Message(_bytes(got.body), got.properties, "", keys)
                if _mark(message) in self._marks:
                    messages.append(message)
        return messages

    # -- faults --------------------------------------------------------------------------------

    def duplicate_next(self) -> NoReturn:
        """Raise an error, as :meth:`crash_worker` and :meth:`outage`: only memory has faults."""
        raise KitError(
            "faults can be had only in memory: run this test without a broker, or skip it there"
        )

    crash_worker = outage = duplicate_next


def _mark(message: Message) -> tuple[Any, ...]:
    """Return what the broker does not change."""
    return id_and_headers(message.properties)[0], due_in(message.headers), message.body


def _bytes(body: Any) -> bytes:
    return body.encode() if isinstance(body, str) else bytes(body)
