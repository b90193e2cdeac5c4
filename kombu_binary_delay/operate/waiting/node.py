"""Read waiting tasks on the broker's node: exactly, without a journal and without a change.

This needs a command that runs ``rabbitmqctl`` on the broker's host. It runs twice, for any number
of messages: to list the queues, and to read them; once more for every few hundred queues.
"""

from __future__ import annotations

import binascii
import shlex
import struct
import subprocess
import tempfile
import time
import zlib
from base64 import b64decode
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import PurePath
from typing import IO, Any

from kombu_binary_delay.amendments.names import POSTPONED
from kombu_binary_delay.amendments.parts import way_of_records
from kombu_binary_delay.journal.events import cut
from kombu_binary_delay.ladder.foreign import ForeignLadder
from kombu_binary_delay.ladder.identity import id_and_headers, is_celery_task
from kombu_binary_delay.ladder.recognise import topology_of_name
from kombu_binary_delay.ladder.topology import VERSION, Topology
from kombu_binary_delay.operate.errors import OperationError, UnreachableError
from kombu_binary_delay.operate.reading import UNREADABLE_ERRORS, Source, read, sources
from kombu_binary_delay.operate.text import plural
from kombu_binary_delay.wire.undecodable import decode, undecodable

from . import script
from .table import TaskTable
from .task import NODE, UNJUDGED, Event, Judge, Story, WaitingTask, amend, text_of

_MARK = b"kbd "
#: In the payload of a header frame, what is before the properties: class, weight, the body's size.
_BEFORE = struct.pack(">HHQ", 60, 0, 0)
_QUORUM = "rabbit_quorum_queue"
#: A message that leaves its queue within so many milliseconds may be read again in the next one.
_SOON = 600_000
#: The most of these messages to remember, to limit the memory.
_REMEMBERED = 200_000
_WORDS = 2000  # characters of an error that are shown


def from_node(
    command: str | Sequence[str],
    vhost: str,
    topology: Topology,
    judge: Judge | None = None,
    *,
    cluster: str | None = None,
) -> TaskTable:
    """Read the tasks in the levels of all ladders of a namespace on the node.

    :param command: the prefix that runs ``rabbitmqctl`` on the broker's host, such as
        ``docker exec rabbit``; empty on the host itself.
    :param vhost: the virtual host.
    :param topology: a ladder of the namespace, or another system's.
    :param judge: applies the amendments, see :func:`judge_of`.
    :param cluster: the name of the cluster that the node must be of, as the broker sends it in
        ``connection.connection.server_properties["cluster_name"]``; None for any.
    :raises UnreachableError: if the command fails.
    :raises OperationError: if there are levels, but none of them can be read; or if the node is of
        another cluster, or does not have the virtual host; or if no temporary file can be made.
    """
    return NodeReader(_arguments(command), vhost, topology, judge, cluster).tasks()


def story_by_node(  # noqa: PLR0913 - as from_node
    command: str | Sequence[str],
    vhost: str,
    topology: Topology,
    task_id: str,
    judge: Judge | None = None,
    *,
    cluster: str | None = None,
) -> Story:
    """Return where a task waits, as read on the node; the parameters are those of ``from_node``.

    :raises OperationError, UnreachableError: as :func:`from_node`.
    """
    reader = NodeReader(_arguments(command), vhost, topology, judge, cluster)
    task, state = None, "unknown"
    with closing(reader.judged()) as judged:
        for waiting, amended in judged:
            if waiting.id != task_id:
                continue
            if task is None or amended in ("", POSTPONED):
                task, state = waiting, amended or "waiting"
            # A superseded task may come before the valid one.
            if amended in ("", POSTPONED):
                break
    events = () if state in ("waiting", "unknown") else (Event(state, None),)
    return Story(task_id, state, NODE, task, events, reader.missing())


class NodeReader:
    """Reads the tasks that wait in quorum queues, page by page."""

    def __init__(
        self,
        command: Sequence[str],
        vhost: str,
        topology: Topology,
        judge: Judge | None,
        cluster: str | None,
    ) -> None:
        self._command = command
        self._vhost = vhost
        self._topology = topology
        self._judge = judge
        self._cluster = cluster
        self._unread: dict[str, str] = {}
        self._missed = self._unreadable = 0
        types = dict(self._queues())
        every = self._levels(types)
        levels = [source for source in every if types[source.name] == _QUORUM]
        #: The levels that can be read, the longest wait first: a message that moves down meanwhile
        #: is read again, and none is missed.
        self._sources = levels
        classic = len(every) - len(levels)
        if classic and not levels:
            raise OperationError(
                f"all {classic} levels are classic queues, which cannot be looked into without "
                f"taking their messages; set journal to 'stream' in the settings of publishers, "
                f"and use --source journal"
            )
        self._classic = classic

    def tasks(self) -> TaskTable:
        """Read all of them."""
        table = TaskTable(NODE)
        with table.filling(), closing(self.judged()) as judged:
            for task, amended in judged:
                table.add(task, amended)
        table.complete = not (self._classic or self._unread or self._unreadable)
        table.missing = self.missing()
        return table

    def judged(self) -> Generator[tuple[WaitingTask, str]]:
        """Yield each task, and how it was amended; an empty string if it was not."""
        self._unread = {}
        self._missed = self._unreadable = 0
        met: set[int] = set()
        start = time.time_ns() // 1_000_000
        levels = {source.name: source for source in self._sources}
        for names in script.batches(levels):
            yield from self._read([levels[name] for name in names], start, met)

    def _read(
        self, levels: Sequence[Source], start: int, met: set[int]
    ) -> Iterator[tuple[WaitingTask, str]]:
        """Yield what is in some levels; ``met`` has what was read before."""
        source = levels[0]
        names = [level.name for level in levels]
        for word, *rest in self._run(script.read_queues(self._vhost, names)):
            if word == b"begin":
                source = levels[int(rest[0])]
            elif word == b"skip":
                self._unread[names[int(rest[0])]] = b64decode(rest[1]).decode("utf-8", "replace")
            elif word == b"page":
                pairs = _pairs(b64decode(rest[1]))
                self._missed += int(rest[0]) - len(pairs)
                for key, written in pairs:
                    judged = self._task(source, key, written, start, met)
                    if judged is not None:
                        yield judged

    def missing(self) -> tuple[str, ...]:
        """Return sentences about what was not read."""
        said = []
        if self._classic:
            said.append(
                f"{plural(self._classic, 'classic queue')} of the ladder left out: a node cannot "
                f"look into such"
            )
        said += [f"the queue {name} was not read: {why}" for name, why in self._unread.items()]
        if self._judge is None:
            said.append(UNJUDGED)
        if self._missed:
            said.append(f"{plural(self._missed, 'message')} left the queue while it was read")
        if self._unreadable:
            said.append(f"{plural(self._unreadable, 'message')} could not be decoded")
        return tuple(said)

    # -- what a message says ---------------------------------------------------------------------

    def _task(
        self, source: Source, key: bytes, written: bytes, start: int, met: set[int]
    ) -> tuple[WaitingTask, str] | None:
        now = time.time_ns() // 1_000_000
        try:
            message = decode(_BEFORE + written)
            if undecodable(message):
                self._unreadable += 1
                return None
            properties = message.properties
            routing_key = key.decode("utf-8", "surrogateescape")
            reading = read(source, routing_key, properties, now)
            # Beside those of the settings, ladders of the other type of queues are read.
            ladder = source.topology or self._topology
            if reading is None or reading.destination == way_of_records(ladder):
                # The latter is a record of amendments.
                return None
            leaves = reading.due - self._rest(source, routing_key)
        except UNREADABLE_ERRORS:
            self._unreadable += 1
            return None
        id_, headers = id_and_headers(reading.properties)
        name = headers["task"] if is_celery_task(headers) else None
        if leaves < start + _SOON:
            # It may have been read in the queue before, or will be in the next one.
            seen = hash((id_, name, reading.due, reading.destination))
            if id_ and seen in met:
                return None
            if len(met) < _REMEMBERED:
                met.add(seen)
        retries = headers.get("retries")
        args, kwargs = text_of(headers.get("argsrepr")), text_of(headers.get("kwargsrepr"))
        task = WaitingTask(
            id_ or None,
            name,
            None if args is None else cut(args),
            None if kwargs is None else cut(kwargs),
            reading.destination.exchange,
            reading.destination.routing_key,
            reading.due,
            retries if name is not None and type(retries) is int else None,
            source.name,
            NODE,
        )
        return amend(task, self._judge(reading.properties) if self._judge else None)

    def _rest(self, source: Source, key: str) -> int:
        """Return the rest of a message's wait after this queue, in milliseconds."""
        topology = source.topology
        if topology is None or not source.level or not topology.is_ours:
            return 0
        lower = key.split(".", source.level)[: source.level]
        return topology.ladder.delay(tuple(reversed(lower)))

    # -- what the node is asked ------------------------------------------------------------------

    def _queues(self) -> Iterator[tuple[str, str]]:
        topology = self._topology
        is_foreign = isinstance(topology, ForeignLadder)
        prefix = topology.namespace if is_foreign else f"{topology.namespace}.{VERSION}-"
        for word, *rest in self._run(script.list_queues(self._vhost, [prefix])):
            if word == b"node":
                self._refuse_another(b64decode(rest[0]).decode("utf-8", "replace"), rest[1])
            elif word == b"queue":
                name = b64decode(rest[1]).decode("utf-8", "replace")
                if self._is_level(name):
                    yield name, rest[0].decode()

    def _refuse_another(self, cluster: str, has_vhost: bytes) -> None:
        """Raise an error if the node is not one of the broker in use: its list would be wrong."""
        if self._cluster not in (None, cluster):
            why = f"of the cluster {cluster!r}, and the broker in use is {self._cluster!r}"
        elif has_vhost == b"false":
            why = f"of the cluster {cluster!r}, which has no virtual host {self._vhost!r}"
        else:
            return
        raise OperationError(
            f"the node that {self._shown!r} reaches is {why}; run this on a host of the broker in "
            f"use, give the --node-command that reaches one, or keep a journal (setting journal: "
            f"'stream')"
        )

    def _is_level(self, name: str) -> bool:
        if isinstance(self._topology, ForeignLadder):
            return self._topology.owns(name)
        return topology_of_name(name) is not None

    def _levels(self, types: Mapping[str, str]) -> list[Source]:
        ladders: set[Topology] = {self._topology}
        if not isinstance(self._topology, ForeignLadder):
            ladders = {ladder for ladder in map(topology_of_name, types) if ladder is not None}
        levels = [source for ladder in ladders for source in sources(ladder, types)]
        return sorted(levels, key=lambda source: (-source.wait, source.name))

    @property
    def _shown(self) -> str:
        return " ".join([*self._command, "rabbitmqctl"])

    def _run(self, expression: str) -> Iterator[list[bytes]]:
        """Evaluate an expression on the node, and yield the words of each line that it prints.

        :raises UnreachableError: if it does not end normally.
        """
        arguments = [*self._command, "rabbitmqctl", "--quiet", "eval", expression]
        if self._command and PurePath(self._command[0]).name == "ssh":
            # A shell on the other side parses the arguments of ssh again.
            arguments[-1] = shlex.quote(expression)
        shown = self._shown
        with _temporary_file() as errors:
            try:
                process = subprocess.Popen(  # noqa: S603 - it is the operator's own
                    arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
                )
            except OSError as exc:
                raise self._failure(f"{shown!r} cannot be run: {exc}") from exc
            try:
                last = yield from _words(process.stdout)
                process.wait()
            finally:
                # The caller may stop early; the node stops when its output is closed.
                process.kill()
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()
            if last != b"end":
                errors.seek(0)
                said = errors.read(_WORDS).decode("utf-8", "replace").strip().partition("\n\n")[0]
                # The suggestions that it refers to are not shown here.
                said = said.removeprefix("Error: ").partition(" Please see")[0].rstrip(".")
                raise self._failure(
                    f"{shown} says {said!r}" if said else f"{shown} printed nothing"
                )

    def _failure(self, why: str) -> UnreachableError:
        elsewhere = "" if self._command else " or give --node-command,"
        return UnreachableError(
            f"cannot list from the node: {why}. Run this on the broker's host,{elsewhere} or keep "
            f"a journal (setting journal: 'stream')"
        )


def _arguments(command: str | Sequence[str]) -> list[str]:
    if not isinstance(command, str):
        return list(command)
    try:
        return shlex.split(command)
    except ValueError as exc:
        raise OperationError(
            f"the words before rabbitmqctl, {command!r}, cannot be read as a shell reads them: "
            f"{exc}; change --node-command or BINARY_DELAY_NODE_COMMAND"
        ) from exc


def _temporary_file() -> IO[bytes]:
    try:
        return tempfile.TemporaryFile()
    except OSError as exc:
        raise OperationError(
            f"no temporary file can be made: {exc.strerror}; free some space, or name another "
            f"folder in TMPDIR"
        ) from exc


def _words(lines: IO[bytes] | None) -> Any:
    """Yield the words of each line that the expression printed, and return its last word."""
    last = b""
    for line in lines or ():
        # Skip the command's own output.
        if line.startswith(_MARK):
            words = line.split()[1:]
            last = words[0]
            yield words
    return last


def _pairs(term: bytes) -> list[tuple[bytes, bytes]]:
    """Read a list of pairs of binaries in Erlang's external term format.

    :raises UnreachableError: if it is not such a list.
    """
    with suppress(IndexError, struct.error, zlib.error, binascii.Error, ValueError):
        if term[:2] == b"\x83P":
            term = b"\x83" + zlib.decompress(term[6:])
        if term == b"\x83j":
            return []
        kind, count = struct.unpack_from(">xcI", term)
        if kind == b"l":
            return list(_read_pairs(term, 6, count))
    raise UnreachableError("the node printed something else than a page of messages")


def _read_pairs(term: bytes, at: int, count: int) -> Iterator[tuple[bytes, bytes]]:
    for _ in range(count):
        pair = []
        at += 2
        for _ in range(2):
            [length] = struct.unpack_from(">xI", term, at)
            pair.append(term[at + 5 : at + 5 + length])
            at += 5 + length
        yield pair[0], pair[1]
