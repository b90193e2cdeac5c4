"""Rows become messages on an executor: sent in windows, each with its outcome. It knows no Spark.

Each message is made by the application's own ``send_task``, so it is what a web server would have
sent. Where the connection breaks, it is made again, and what the broker has not confirmed is sent
again: a message may double, with the same task id, and is not lost.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import cache
from importlib import import_module
from typing import Any

import amqp
import kombu
from celery import Celery
from celery.exceptions import QueueNotFound
from kombu.exceptions import KombuError

from kombu_binary_delay.batch import CONFIRMED, DISCARDED, NACKED, RETURNED, Outcome, PublishBatch
from kombu_binary_delay.errors import DelayError, UnconfirmedError
from kombu_binary_delay.settings import KEY, Settings

from . import schema as s

logger = logging.getLogger(__name__)

WINDOW = 1000
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_TRANSPORT = "kombu_binary_delay:Transport"
_STATUS = {CONFIRMED: s.PUBLISHED, RETURNED: s.RETURNED, NACKED: s.NACKED}
#: One message's own trouble, which is none of the next one's.
_ITS_OWN = (KombuError, QueueNotFound, TypeError, ValueError)


@dataclass(frozen=True)
class Target:
    """Where to send, and how: plain values, which travel to the executors.

    :param broker: the URL; None where the application knows it.
    :param app: ``"module:name"`` of a Celery application that the executors can import; None for
        one with Celery's defaults.
    :param settings: what ``broker_transport_options["binary_delay"]`` would be; None for what the
        application has.
    :param rate: messages per second at most; None without limit.
    :param patience: seconds for which to try to reach a broker that is away.
    """

    broker: str | None = None
    app: str | None = None
    settings: dict[str, Any] | None = None
    rate: float | None = None
    patience: float = 60.0

    def application(self) -> Celery:
        """Give the application, once a process."""
        return _application(self.app, self.broker)

    def transport_options(self) -> dict[str, Any]:
        """Give the transport's options: the application's, and our settings over them."""
        options = dict(self.application().conf.broker_transport_options)
        return options if self.settings is None else {**options, KEY: self.settings}

    def ladder_settings(self) -> Settings:
        """Read the settings of the transport."""
        return Settings.from_transport_options(self.transport_options())


@dataclass(eq=False)
class Sent:
    """A row on its way, and what its receipt will say."""

    row: dict[str, Any]
    due: int  # microseconds since the epoch, as all times here
    published_at: int = 0
    queue: str | None = None
    hops: int | None = None
    status: str = s.UNKNOWN
    detail: str | None = None


@cache
def _application(path: str | None, broker: str | None) -> Celery:
    if path is None:
        app = Celery("kombu_binary_delay.spark", set_as_current=False)
    else:
        module, _, name = path.partition(":")
        app = getattr(import_module(module), name or "app")
    if broker is not None:
        app.conf.broker_url = broker
    if not app.conf.broker_transport:
        app.conf.broker_transport = _TRANSPORT
    return app


class _Producer(kombu.Producer):
    """What ``send_task`` publishes with: into a batch instead of to the broker."""

    batch: PublishBatch
    current: Sent
    patience: float
    declared: dict[int, Any]

    def publish(self, body: Any, **options: Any) -> Any:
        # Whoever tries again is the sender, which knows of all the messages in the window.
        return super().publish(body, **{**options, "retry": False})

    def _publish(
        self,
        body: Any,
        priority: Any,
        content_type: Any,
        content_encoding: Any,
        headers: Any,
        properties: Any,
        routing_key: str,
        mandatory: Any,
        immediate: Any,
        exchange: str,
        declare: Iterable[Any],
        *_: Any,
        **__: Any,
    ) -> None:
        message = self.channel.prepare_message(
            body, priority, content_type, content_encoding, headers, properties
        )
        for entity in declare:
            # Once: merely to look whether it is declared costs Kombu a tenth of the publish.
            if self.declared.get(id(entity)) is not entity:
                self.maybe_declare(entity)
                self.declared[id(entity)] = entity
        sent = self.current
        sent.queue = f"{exchange}/{routing_key}" if exchange else routing_key
        # A message without a destination is to be told of, not dropped; and a broker that is away
        # without a word is away all the same.
        self.batch.publish(
            message,
            exchange,
            routing_key,
            mandatory=True,
            confirm_timeout=self.patience,
            tag=sent,
        )


@dataclass
class Sender:
    """Sends rows, and gives each back with its status, as the broker answers.

    A row is a mapping with ``task_id``, ``task``, ``eta`` (microseconds since the epoch) or
    ``countdown`` (seconds), and optionally ``args`` and ``kwargs`` (JSON), ``queue``,
    ``exchange``, ``routing_key``, ``priority``, ``expires`` (microseconds since the epoch) and
    ``headers`` (JSON).
    """

    target: Target
    _settled: list[Sent] = field(default_factory=list)
    _again: list[Sent] = field(default_factory=list)
    _connection: Any = None
    _producer: Any = None

    def send(self, rows: Iterable[dict[str, Any]]) -> Iterator[list[Sent]]:
        """Send rows in their order; yield those that are settled, from time to time.

        :raises OperationalError: where the broker stays away for longer than the patience.
        """
        self._app = self.target.application()
        self._ladder = self.target.ladder_settings().ladder
        try:
            pace = _Pace(self.target.rate)
            for row in rows:
                pace.wait()
                self._try(self._send, self._read(row))
                if len(self._settled) >= WINDOW:
                    yield self._take()
            self._try(self._flush)
            yield self._take()
        finally:
            self._disconnect()

    # -- one message ---------------------------------------------------------------------------

    def _read(self, row: dict[str, Any]) -> Sent:
        if row.get("countdown") is not None:
            # It counts from here, and says no more than a float can.
            return Sent(row, time.time_ns() // 1000 + round(row["countdown"] * 1_000_000))
        return Sent(row, row["eta"])

    def _send(self, sent: Sent) -> None:
        row, producer = sent.row, self._connected()
        producer.current = sent
        sent.published_at = time.time_ns() // 1000
        try:
            delay = max(0, sent.due - sent.published_at) / 1000
            sent.hops = sum(digit > 0 for digit in self._ladder.digits(delay))
            self._app.send_task(
                row["task"],
                args=json.loads(row.get("args") or "[]"),
                kwargs=json.loads(row.get("kwargs") or "{}"),
                task_id=row["task_id"],
                eta=_time(sent.due),
                producer=producer,
                **_options(row),
            )
        except UnconfirmedError:
            raise
        except _ITS_OWN as exc:
            if isinstance(exc, kombu.exceptions.OperationalError):
                raise
            self._settle(sent, s.REFUSED, str(exc) or type(exc).__name__)

    def _flush(self) -> None:
        if self._producer is not None:
            self._producer.batch.flush()

    def _settle(self, sent: Sent, status: str, detail: str | None = None) -> None:
        sent.status, sent.detail = status, detail
        self._settled.append(sent)

    def _on_outcome(self, outcome: Outcome) -> None:
        sent: Sent = outcome.tag
        if outcome.state in _STATUS:
            self._settle(sent, _STATUS[outcome.state], outcome.reply_text or None)
        else:
            sent.status = s.REFUSED if outcome.state == DISCARDED else s.UNKNOWN
            sent.detail = outcome.reply_text
            self._again.append(sent)

    def _take(self) -> list[Sent]:
        taken, self._settled = self._settled, []
        return taken

    # -- and when the connection breaks --------------------------------------------------------

    def _try(self, call: Any, *given: Sent) -> None:
        try:
            call(*given)
        except _lost() as exc:
            if self._producer is not None:
                # What is buffered or unconfirmed is told of now, whoever noticed the break.
                self._producer.batch.discard()
                self._producer.batch.close()
            held = [*self._again, *(each for each in given if each not in self._again)]
            self._recover(held, exc)
        else:
            # The connection is well: what was discarded, was so for a reason of its own.
            self._settled += self._again
        self._again = []

    def _recover(self, held: list[Sent], cause: BaseException) -> None:
        deadline = time.monotonic() + self.target.patience
        while held:
            logger.warning("%s messages are to be sent again: %s", len(held), cause)
            self._disconnect()
            self._again = []
            done = len(self._settled)
            try:
                for sent in held:
                    self._send(sent)
                self._flush()
            except _lost() as exc:
                settled = {id(each) for each in self._settled[done:]}
                if settled:
                    deadline = time.monotonic() + self.target.patience
                if time.monotonic() > deadline:
                    raise
                held, cause = [each for each in held if id(each) not in settled], exc
                time.sleep(0.5)
            else:
                self._settled += self._again
                return

    def _connected(self) -> _Producer:
        if self._producer is None:
            target = self.target
            self._connection = kombu.Connection(
                self._app.conf.broker_write_url or self._app.conf.broker_url,
                transport=self._app.conf.broker_transport,
                transport_options=target.transport_options(),
                connect_timeout=5,
                heartbeat=None,
                failover_strategy=self._app.conf.broker_failover_strategy,
            )
            self._connection.ensure_connection(
                max_retries=1, interval_start=0, interval_step=0, timeout=target.patience
            )
            channel = self._connection.default_channel
            self._producer = _Producer(channel)
            self._producer.patience = target.patience
            self._producer.declared = {}
            window = WINDOW if target.rate is None else max(1, min(WINDOW, int(target.rate / 10)))
            self._producer.batch = PublishBatch(channel, window, self._on_outcome)
        producer: _Producer = self._producer
        return producer

    def _disconnect(self) -> None:
        producer, self._producer = self._producer, None
        connection, self._connection = self._connection, None
        if producer is not None:
            again, self._again = self._again, []
            producer.batch.discard()
            producer.batch.close()
            self._again = again
        if connection is not None:
            connection.release()


class _Pace:
    """No more than so many a second, and no burst after a pause."""

    def __init__(self, rate: float | None) -> None:
        self._gap = 0.0 if rate is None else 1 / rate
        self._next = time.monotonic()

    def wait(self) -> None:
        if not self._gap:
            return
        now = time.monotonic()
        if now < self._next:
            time.sleep(self._next - now)
        self._next = max(self._next, now - 0.1) + self._gap


def _lost() -> tuple[type[BaseException], ...]:
    return (
        UnconfirmedError,
        kombu.exceptions.OperationalError,
        *kombu.Connection("amqp://").connection_errors,
        amqp.exceptions.RecoverableConnectionError,
    )


def _options(row: dict[str, Any]) -> dict[str, Any]:
    options = {
        name: row[name]
        for name in ("queue", "exchange", "routing_key", "priority")
        if row.get(name) is not None
    }
    if row.get("expires") is not None:
        options["expires"] = _time(row["expires"])
    if row.get("headers") is not None:
        headers = json.loads(row["headers"])
        if not isinstance(headers, dict):
            raise DelayError(f"headers must be a JSON object, got {row['headers']!r}")
        options["headers"] = headers
    return options


def _time(micros: int) -> datetime:
    return _EPOCH + timedelta(microseconds=micros)
