"""The scheduler of a worker: takes the occurrences that are due, and sends their runs.

Each worker of an app has one, and the broker makes one of them the active one. For what has
arrived, it publishes the next occurrence of each schedule and this one's run, waits for the
confirms, and only then acknowledges. If it dies in between, the next active one does it again: a
run that was sent by then is sent twice, with the same id. An occurrence that comes twice is
dropped.

If an occurrence does not arrive, as its message or the ladder was deleted, the active scheduler
makes up for it.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

import amqp
import kombu
from amqp.exceptions import RecoverableConnectionError
from kombu.log import get_logger

from kombu_binary_delay.amendments.record import KEY
from kombu_binary_delay.errors import UnconfirmedError
from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.ladder.delay import X_DELAY
from kombu_binary_delay.publishing import PublishBatch
from kombu_binary_delay.publishing.batch import CONFIRMED, RETURNED, Outcome
from kombu_binary_delay.wire.draining import drain
from kombu_binary_delay.wire.streams import StreamChannel
from kombu_binary_delay.wire.undecodable import take_undecodable

from . import definitions, series
from .definitions import SKIP, Definitions, Schedule
from .listing import Names, read_progress
from .series import OVERDUE, Occurrence, Progress, Step, expected, step
from .store import Store, message

logger = get_logger(__name__)

#: The header of a run: its schedule, its due time, and the queue to hold while it runs, if any.
RUN = "x-schedule"
#: How many occurrences are handled together, at most.
_PREFETCH = 500
#: How often the active scheduler writes its progress and looks for what is overdue, and how often
#: another one asks whether it is active by now, in seconds.
_NOTE_EVERY, _LOOK_EVERY, _ASK_EVERY = 2.0, 1.0, 15.0
#: How long to wait for the broker's confirms, in seconds.
_PATIENCE = 30.0
#: After how long a run is tried again that finds no queue, in milliseconds.
_AGAIN = 30_000
_UNKNOWN = Step(dropped="its due times cannot be computed here")
_T = TypeVar("_T")
#: What a scheduler sends itself to learn that it is active.
_ASKED = "{}"


class Run(NamedTuple):
    """A run to send.

    :param named: its task id, if it has one of its own.
    """

    schedule: Schedule
    due: int
    named: str = ""

    @property
    def id(self) -> str:
        """The task id, the same whoever sends it."""
        return self.named or str(
            uuid.uuid5(uuid.NAMESPACE_OID, f"{self.schedule.series}:{self.due}")
        )


class Scheduler:
    """The scheduler of one worker, on a connection of its own.

    It is used up by an error: make another one, with a new connection.

    :param app: of Celery.
    :param client: a :class:`kombu.Connection` with our transport.
    :raises ScheduleError: if the broker or the settings allow no schedules.
    """

    def __init__(self, app: Any, client: Any) -> None:
        self._app, self._store = app, Store(app, client)
        self._store.require()
        self._client, self._connection = client, client.connection
        self._names: Names = self._store.names
        self._channel: Any = None
        self._reader: StreamChannel | None = None
        self._definitions: Definitions = {}
        self._arrived: deque[Any] = deque()
        self._progress: dict[str, Progress] = {}
        #: When the broker has made this the active one, in milliseconds since the epoch; else 0.
        self._active_since = 0
        #: The due times of the next occurrences, as far as they are known.
        self._expected: dict[str, int | None] = {}
        self._is_lost = False
        self._unnoted: set[str] = set()
        self._note_at = self._look_at = self._ask_at = 0.0

    # -- begin and end -------------------------------------------------------------------------

    def begin(self) -> bool:
        """Begin to consume; return False if the app never had schedules on this broker."""
        names = self._names
        if not any(map(self._exists, (names.queue, names.definitions))):
            return False
        self._store.declare_queue()
        # The last records may be no definitions.
        self._definitions = self._store.definitions()
        reader = self._reader = StreamChannel(self._connection, self._learn, self._lose)
        reader.read({names.definitions: 1}, "last")
        reader.read_to_end()
        reader.go_on()
        channel = self._channel = amqp.Channel(self._connection, auto_decode=False)
        take_undecodable(channel)
        channel.runs_no_user_code = True
        channel.open()
        channel.basic_qos(0, _PREFETCH, a_global=False)
        channel.basic_consume(
            names.queue, callback=self._arrived.append, on_cancel=lambda _: self._lose()
        )
        return True

    def _exists(self, queue: str) -> bool:
        """Return whether a queue exists, without an error in the broker's log if it does not."""
        return queue not in self._unrouted([queue])

    def _unrouted(self, queues: Iterable[str]) -> set[str]:
        """Return which of some queues do not exist; the others get a message that says nothing."""
        missing: set[str] = set()

        def note(outcome: Outcome) -> None:
            if outcome.state == RETURNED:
                missing.add(outcome.tag)

        with PublishBatch(self._client.default_channel, on_outcome=note) as batch:
            for queue in queues:
                asked = message(_ASKED, message_id=queue, expiration="60000")
                batch.publish(
                    asked, "", queue, mandatory=True, confirm_timeout=_PATIENCE, tag=queue
                )
        return missing

    def _learn(self, record: Any) -> None:
        learned = definitions.from_line(bytes(record.body))
        if learned is not None:
            self._definitions, self._expected = learned, {}

    def _lose(self) -> None:
        self._is_lost = True

    def end(self) -> None:
        """Write the progress, and close the connection: the broker makes another one active."""
        self._note_progress()
        self._client.close()

    def leave(self) -> None:
        """End the connection without the broker, as a crash would."""
        with suppress(OSError, amqp.AMQPError):
            self._connection.transport.close()
        self._connection.collect()

    # -- one step ------------------------------------------------------------------------------

    def step(self, timeout: float) -> bool:
        """Handle what has arrived, or arrives within a time, and what is overdue.

        :param timeout: in seconds.
        :returns: whether anything was handled.
        :raises RecoverableConnectionError: if the broker has ended the consumer.
        """
        try:
            while not self._arrived and not self._is_lost:
                drain(self._connection, timeout)
            # What has come with it.
            while len(self._arrived) < _PREFETCH:
                drain(self._connection, 0.001)
        except TimeoutError:
            pass
        if self._is_lost or self._channel.connection is None:
            raise RecoverableConnectionError("the queue of the schedules, or a stream, is gone")
        has_come = bool(self._arrived)
        if has_come:
            self._handle_arrived()
        now = time.monotonic()
        if self._active_since and now >= self._look_at:
            self._look_at = now + _LOOK_EVERY
            has_come = self._make_up() or has_come
        if self._unnoted and now >= self._note_at:
            self._note_at = now + _NOTE_EVERY
            self._note_progress()
        if not self._active_since and now >= self._ask_at:
            self._ask_at = now + _ASK_EVERY
            self._unrouted([self._names.queue])
        return has_come

    def next_look(self) -> int | None:
        """Return when the next occurrence would be overdue, in milliseconds since the epoch."""
        if not self._active_since:
            return None
        dues = [due for due in map(self._expects, self._definitions.values()) if due is not None]
        return max(min(dues), self._active_since) + OVERDUE if dues else None

    def _handle_arrived(self) -> None:
        if not self._active_since:
            self._progress = read_progress(self._connection, self._names)
            self._active_since = _now()
            logger.info("this worker's scheduler is active now")
        taken = list(self._arrived)
        self._arrived.clear()
        journal, occurrences = self._store.mechanism.journal, []
        for arrived in taken:
            occurrence = Occurrence.from_line(bytes(arrived.body))
            if occurrence is None:
                continue
            occurrences.append(occurrence)
            if arrived.delivery_info.get("redelivered"):
                logger.info(
                    "the occurrence of %s was another worker's, which may have sent its run: if "
                    "so, this one has the same id",
                    _shown(occurrence.schedule, occurrence.due),
                )
            if journal is not None:
                journal.released(arrived.properties, Destination("", self._names.queue))
        if occurrences:
            self._handle(occurrences)
        self._channel.basic_ack(taken[-1].delivery_info["delivery_tag"], multiple=True)

    def _make_up(self) -> bool:
        """Handle what should have arrived as if it had; return whether there was any."""
        latest = _now() - OVERDUE
        if latest < self._active_since:
            return False
        lost = []
        for schedule in self._definitions.values():
            due = self._expects(schedule)
            if due is not None and due <= latest:
                logger.warning(
                    "the occurrence of %s has not arrived: its run is sent now, and the series "
                    "goes on",
                    _shown(schedule.name, due),
                )
                lost.append(Occurrence(schedule.name, schedule.series, due))
        if lost:
            self._handle(lost)
        return bool(lost)

    def _expects(self, schedule: Schedule) -> int | None:
        if schedule.name not in self._expected:
            last = self._progress.get(schedule.name, Progress()).due
            self._expected[schedule.name] = _computed(schedule, expected, schedule, last)
        return self._expected[schedule.name]

    def _handle(self, occurrences: Iterable[Occurrence]) -> None:
        """Send what follows from some occurrences; return when the broker has confirmed it."""
        runs: list[Run] = []
        following: list[Occurrence] = []
        progress, now = self._progress, _now()
        for occurrence in occurrences:
            name, schedule = occurrence.schedule, self._definitions.get(occurrence.schedule)
            before = progress.get(name, Progress())
            done = _computed(schedule, step, schedule, occurrence, before.due, now) or _UNKNOWN
            if done.dropped or schedule is None:
                logger.debug("dropped %s: %s", _shown(name, occurrence.due), done.dropped)
                continue
            if done.following is not None:
                following.append(Occurrence(name, schedule.series, done.following))
            if done.missed:
                logger.warning(
                    "%s: %d occurrences were missed, and are left out", name, done.missed
                )
            if done.runs:
                runs += [Run(schedule, due) for due in done.runs]
                due = max(done.runs)
                progress[name] = before._replace(
                    due=due, at=now, missed=before.missed + done.missed
                )
                self._expected.pop(name, None)
                self._unnoted.add(name)
        self._send(self._without_overlap(runs), following)

    def _without_overlap(self, runs: list[Run]) -> list[Run]:
        """Return the runs but those of schedules that allow one at a time and have one."""
        alone = {run.schedule.name for run in runs if run.schedule.overlap == SKIP}
        if not alone:
            return runs
        queues = {self._names.running(name): name for name in alone}
        busy = {queues[queue] for queue in queues.keys() - self._unrouted(queues)}
        for run in runs:
            name = run.schedule.name
            if name in busy:
                logger.warning("%s is left out: the last run has not ended", _shown(name, run.due))
                before = self._progress[name]
                self._progress[name] = before._replace(skipped=before.skipped + 1)
        return [run for run in runs if run.schedule.name not in busy]

    # -- send ----------------------------------------------------------------------------------

    def _send(self, runs: list[Run], following: list[Occurrence]) -> None:
        """Publish occurrences and runs; return when the broker has confirmed them.

        A run that cannot be sent is an error in the log, and holds up no other. One whose queue is
        missing, or on a node that is down, is sent again by the ladder, which parks what finds no
        queue.
        """
        unsent = dict.fromkeys(range(len(runs)), 0)

        def note(outcome: Outcome) -> None:
            if outcome.tag is None and outcome.state != CONFIRMED:
                raise RecoverableConnectionError(f"an occurrence is {outcome.state}")
            if outcome.state == CONFIRMED:
                unsent.pop(outcome.tag, None)
            elif outcome.state == RETURNED:
                unsent[outcome.tag] = _AGAIN

        with PublishBatch(self._client.default_channel, on_outcome=note) as batch:
            self._store.arm(batch, following)
        try:
            self._publish(dict(enumerate(runs)), note)
        except (amqp.ChannelError, kombu.exceptions.KombuError):
            if not self._connection.connected:
                raise
        self._send_one_by_one(runs, unsent, note)

    def _send_one_by_one(
        self, runs: list[Run], unsent: dict[int, int], note: Callable[[Outcome], object]
    ) -> None:
        """Send what is left where the broker has refused one, and perhaps closed the channel.

        :param unsent: how long to delay each, in milliseconds, by the numbers of the runs.
        """
        for number, delay in list(unsent.items()):
            reason = "the broker refuses it"
            try:
                self._publish({number: runs[number]}, note, delay)
            except (amqp.ChannelError, kombu.exceptions.KombuError) as exc:
                if not self._connection.connected:
                    raise
                reason = str(exc)
            shown = _shown(runs[number].schedule.name, runs[number].due)
            if number in unsent:
                logger.error("%s cannot be sent: %s", shown, reason)
            elif delay:
                logger.warning("%s finds no queue: it is tried in %d s", shown, delay // 1000)

    def _publish(
        self, runs: Mapping[int, Run], note: Callable[[Outcome], object], delay: int = 0
    ) -> None:
        if not runs:
            return
        with PublishBatch(self._client.default_channel, on_outcome=note) as batch:
            producer = _Producer(self._client.default_channel)
            producer.batch = batch
            for number, run in runs.items():
                producer.tag = number
                try:
                    send(self._app, run, producer, self._names, delay=delay)
                except (*self._client.connection_errors, UnconfirmedError):
                    raise
                except Exception:
                    # Of the app's own code, or of arguments that it cannot encode.
                    logger.exception("%s cannot be sent", _shown(run.schedule.name, run.due))
                    note(Outcome(number, CONFIRMED))

    def _note_progress(self) -> None:
        if self._unnoted and self._connection.connected:
            kept = {
                name: made for name, made in self._progress.items() if name in self._definitions
            }
            self._store.publish([(self._names.progress, series.to_line(kept))])
            self._unnoted.clear()


class _Producer(kombu.Producer):
    """A producer that publishes into a batch."""

    batch: PublishBatch
    tag: int

    def _publish(self, body: Any, *given: Any, **_: Any) -> None:
        # Of Kombu's own, which has more parameters in some releases.
        *made_of, routing_key, _mandatory, _immediate, exchange, declare = given[:10]
        made = self.channel.prepare_message(body, *made_of)
        for entity in declare:
            self.maybe_declare(entity)
        # An event of Celery's that it was sent comes after it.
        tag, self.tag = self.tag, -1
        self.batch.publish(
            made, exchange, routing_key, tag >= 0, confirm_timeout=_PATIENCE, tag=tag
        )


def send(app: Any, run: Run, producer: Any, names: Names, delay: int = 0) -> Any:
    """Send the task of a run, as beat does; return its result.

    :param delay: in milliseconds.
    """
    schedule, due = run.schedule, run.due
    options = dict(schedule.options)
    of_run = {"name": schedule.name, "due": datetime.fromtimestamp(due / 1000, UTC).isoformat()}
    headers = {**(options.pop("headers", None) or {}), RUN: of_run}
    if delay:
        headers[X_DELAY] = delay
    if schedule.overlap == SKIP:
        # Of those that no worker has taken yet, the latest runs.
        headers[KEY] = f"schedule:{names.queue}:{schedule.name}"[:255]
        of_run["holds"] = names.running(schedule.name)
    given = {
        **options,
        "headers": headers,
        "task_id": run.id,
        "producer": producer,
        "retry": False,
    }
    task = app.tasks.get(schedule.task)
    if task is not None:
        return task.apply_async(schedule.args, schedule.kwargs, **given)
    return app.send_task(schedule.task, schedule.args, schedule.kwargs, **given)


def _computed(schedule: Schedule | None, function: Callable[..., _T], *given: Any) -> _T | None:
    """Return what follows for a schedule; None if that cannot be computed here.

    A zone or a library may be missing: that must not hold up other schedules.
    """
    try:
        return function(*given)
    except Exception:
        logger.exception("no due time of %s can be computed", schedule and schedule.name)
        return None


def _shown(name: str, due: int) -> str:
    return f"{name} of {datetime.fromtimestamp(due / 1000, UTC).isoformat()}"


def _now() -> int:
    return time.time_ns() // 1_000_000
