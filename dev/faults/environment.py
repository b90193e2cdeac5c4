"""Purpose: where a scenario runs: a broker or a cluster, a ledger, and the programs.

A scenario is a function that is given an `Environment` and makes things happen with it. What must
hold besides (nothing lost, nothing early, nothing misdelivered) is judged from the ledger at its
end.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import amqp
from kombu import Connection, Queue

from dev.broker import Broker, BrokerError
from dev.cluster import Cluster
from dev.faults.ledger import CONFIRMED, DELIVERED, SENT, Book, Entry, Verdict, judge
from dev.faults.programs import TRANSPORT, Cancelling, Consuming, Publishing, to_argv
from dev.faults.proxy import Proxy
from dev.faults.tasks import send
from dev.processes import Process, Processes
from dev.worker import Worker
from kombu_binary_delay import Settings, Topology
from kombu_binary_delay.ladder.versions import OLDEST
from kombu_binary_delay.wire.executor import declare

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dev.broker import VHost

HERE = Path(__file__).parents[2]
#: A quorum queue that is younger than about a second when its node is killed comes back empty.
OLD_ENOUGH = 3.0
#: A machine that does much else may take so long for anything, in seconds. What a dead-letter
#: worker holds back stays away for longer: 180.
BUSY = 150.0
Version = tuple[int, ...]


class ScenarioError(RuntimeError):
    """The scenario did not go as it should, for reasons of its own."""


@dataclass(frozen=True)
class Case:
    """One scenario.

    run:      runs it.
    nodes:    of the broker.
    advanced: the broker's advanced.config, in place of the recommended one.
    config:   more lines for its rabbitmq.conf.
    short:    whether it is a part of the short form.
    since:    the first RabbitMQ that can keep the promise.
    on:       returns the root of the RabbitMQ to run on, whatever the others run on.
    """

    scenario: str
    name: str
    run: Callable[[Environment], None]
    nodes: int = 1
    advanced: str | None = None
    config: Mapping[str, str | int] | None = None
    short: bool = False
    since: Version = OLDEST
    on: Callable[[], str] | None = None


@dataclass(frozen=True)
class Check:
    """Something that must hold beside the ledger: a figure and its limit."""

    what: str
    value: float
    limit: float

    @property
    def holds(self) -> bool:
        """Whether the figure is within its limit."""
        return self.value <= self.limit


@dataclass(frozen=True)
class Outcome:
    """The result of a case."""

    case: Case
    broker: str
    verdict: Verdict
    checks: tuple[Check, ...]
    notes: dict[str, Any]

    @property
    def holds(self) -> bool:
        """Whether all that was promised has held."""
        return self.verdict.is_clean and all(check.holds for check in self.checks)


class Program:
    """A publisher or a consumer that runs."""

    def __init__(self, processes: Processes, process: Process, log: Path) -> None:
        self._processes, self._process, self._log = processes, process, log

    def wait(self, timeout: float) -> int:
        """Wait until it has ended by itself; return its exit status."""
        return self._process.wait(timeout)

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL."""
        self._processes.kill(self._process)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL where that is not enough."""
        self._processes.stop(self._process, 5)

    def log(self) -> str:
        """Return what it printed."""
        return self._log.read_text(errors="replace")


class Environment:
    """What a scenario works with."""

    def __init__(self, broker: Broker | Cluster, processes: Processes, *, short: bool) -> None:
        self.short = short
        self.nodes = broker.nodes if isinstance(broker, Cluster) else [broker]
        self.cluster = broker if isinstance(broker, Cluster) else None
        self.broker = self.nodes[0]
        self.vhost: VHost = self.broker.vhost()
        self.topology: Topology = Settings().topology()
        self.processes = processes
        self.checks: list[Check] = []
        self.notes: dict[str, Any] = {}
        #: Seconds before its due time that a message may come, where a clock was moved.
        self.ahead = 0.0
        self._programs: list[Program] = []
        self._books = 0

    def move_to(self, broker: Broker) -> None:
        """Go on with another broker, in a virtual host of the same name."""
        self.nodes, self.broker = [broker], broker
        self.vhost = replace(self.vhost, broker=broker)
        self.topology = Settings().topology()
        broker.api("PUT", f"vhosts/{self.vhost.name}", {})

    @property
    def urls(self) -> list[str]:
        """What a client is given: every node."""
        return [replace(self.vhost, broker=node).url for node in self.nodes]

    # -- what a scenario sets up ----------------------------------------------------------------

    def queue(self, name: str, node: Broker | None = None, **arguments: object) -> None:
        """Declare a durable queue as an administrator would: a quorum queue by default.

        :param arguments: with `_` for each `-`.
        """
        arguments = {"x_queue_type": "quorum", **arguments}
        with (node or self.broker).connect(self.vhost.name) as connection:
            connection.channel().queue_declare(
                name,
                durable=True,
                auto_delete=False,
                arguments={key.replace("_", "-"): value for key, value in arguments.items()},
            )

    def declare_ladder(self, *queues: str, longest: float = 60.0) -> None:
        """Declare the ladder ahead, and wait until it is old enough to survive a SIGKILL.

        :param longest: the longest delay, in seconds, that a scenario uses.
        """
        part = self.topology.base
        height = len(self.topology.ladder.digits(longest * 1000))
        for level in self.topology.levels[:height]:
            part += level
        for queue in queues:
            part += self.topology.to_queue(queue)
        with self.vhost.connect() as connection:
            declare(connection.channel(), part)
        time.sleep(OLD_ENOUGH)

    def publisher(
        self,
        destinations: Sequence[str | tuple[str, str, list[str]]],
        count: int,
        rate: float = 100.0,
        delays: tuple[float, float] = (0.2, 8.0),
        **more: Any,
    ) -> Program:
        """Start a publisher; a plain name is a queue that is addressed by its name."""
        options = Publishing(
            urls=more.pop("urls", self.urls),
            book=self._book(),
            destinations=[
                ("", destination, [destination]) if isinstance(destination, str) else destination
                for destination in destinations
            ],
            count=count,
            rate=rate,
            delays=delays,
            **more,
        )
        return self._start(options)

    def consumer(self, *queues: str, **more: Any) -> Program:
        """Start a consumer."""
        options = Consuming(
            urls=more.pop("urls", self.urls), book=self._book(), queues=list(queues), **more
        )
        return self._start(options)

    def canceller(self, names: Sequence[str], **more: Any) -> Program:
        """Start a program that cancels these messages."""
        options = Cancelling(
            urls=more.pop("urls", self.urls), book=self._book(), names=list(names), **more
        )
        return self._start(options)

    def worker(self, *options: str, urls: list[str] | None = None) -> Worker:
        """Start a Celery worker of the application in tasks.py."""
        env = {
            "FAULTS_BROKER": ";".join(urls or self.urls),
            "FAULTS_BOOK": self._book(),
            "PYTHONPATH": str(HERE),
        }
        return Worker(self.processes, "dev.faults.tasks", env, *options)

    def send_tasks(
        self,
        count: int,
        *,
        first: int = 0,
        rate: float = 100.0,
        longest: float = 8.0,
        urls: list[str] | None = None,
    ) -> None:
        """Send tasks with a countdown of 0.3 to ``longest`` seconds to such a worker.

        :param first: the number of the first, by which it is named.
        """
        numbers = range(first, first + count)
        send(urls or self.urls, Book(Path(self._book())), numbers, rate, longest)

    def proxied(self, proxy: Proxy) -> list[str]:
        """Write the URL of the broker behind a proxy."""
        return [proxy.through(self.vhost.url)]

    # -- what is seen --------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """Read what all programs have written until now."""
        books = sorted(self.processes.folder.glob("*.book"))
        return [entry for book in books for entry in Book(book).entries()]

    def count(self, event: str) -> int:
        """Count the messages to which something has happened."""
        return len({entry["id"] for entry in self.entries() if entry["event"] == event})

    def wait_for(self, event: str, count: int, timeout: float = BUSY) -> None:
        """Wait until it has happened to so many messages."""
        self.wait_until(lambda: self.count(event) >= count, f"{event} {count}", timeout)

    def wait_until(self, holds: Callable[[], object], what: str, timeout: float = BUSY) -> None:
        """Wait until it holds.

        :raises ScenarioError: where it does not.
        """
        deadline = time.monotonic() + timeout
        while not holds():
            if time.monotonic() > deadline:
                logs = "\n".join(program.log()[-2000:] for program in self._programs)
                raise ScenarioError(f"after {timeout:g} s not yet: {what}\n{logs}")
            time.sleep(0.1)

    def wait_until_done(self, patience: float = BUSY) -> None:
        """Wait until all that is confirmed is done, or so many seconds from now or the last due."""
        last = max(
            (entry["due"] for entry in self.entries() if entry["event"] == SENT), default=0.0
        )
        end = max(last, time.time()) + patience
        while self.verdict().lost and time.time() < end:
            time.sleep(0.2)
        if self.verdict().lost:
            self.notes["kept"] = self.kept()
        # What is not to run is to have had the time for it.
        time.sleep(max(0.0, last + 1 - time.time()) if self.verdict().amended else 0.0)
        time.sleep(1)  # a duplicate, if there is one, is not far behind

    def kept(self) -> int:
        """Count what the broker still holds, in the hands of dead-letter workers too."""
        time.sleep(6)  # quorum queues report their length every 5 s
        rows = self.queues()
        return sum(max(row.get("messages", 0), row.get("messages_dlx", 0)) for row in rows)

    def queues(self, timeout: float = BUSY) -> list[dict[str, Any]]:
        """List the queues; a node that has just come back may not answer at once."""
        deadline = time.monotonic() + timeout
        while True:
            for node in self.nodes:
                with suppress(OSError, BrokerError):
                    return replace(self.vhost, broker=node).queues()
            if time.monotonic() > deadline:
                raise ScenarioError(f"no node has listed its queues within {timeout:g} s")
            time.sleep(1)

    def parked(self) -> int:
        """Count what found no destination."""
        return self.vhost.waiting(self.topology.parking).get(self.topology.parking, 0)

    def redrive(self) -> int:
        """Send on what is parked, as the operators' page describes; return how many."""
        sent = 0
        options = {"confirm_publish": True}
        with Connection(
            self.vhost.url, transport=TRANSPORT, transport_options=options
        ) as connection:
            channel = connection.channel()
            parking = Queue(self.topology.parking, no_declare=True)(channel)
            while (message := parking.get()) is not None:
                to = message.delivery_info
                channel.basic_publish(
                    amqp.Message(message.body, **message.properties),
                    exchange=to["exchange"],
                    routing_key=to["routing_key"],
                    mandatory=True,
                )
                message.ack()
                sent += 1
        return sent

    def lateness(self, queue: str) -> list[float]:
        """List how late the messages for a queue were, in seconds; `inf` for those not there."""
        entries = self.entries()
        first: dict[str, float] = {}
        for entry in entries:
            if entry["event"] == DELIVERED:
                first[entry["id"]] = min(first.get(entry["id"], entry["at"]), entry["at"])
        confirmed = {entry["id"] for entry in entries if entry["event"] == CONFIRMED}
        due = {
            entry["id"]: float(entry["due"])
            for entry in entries
            if entry["event"] == SENT and queue in entry["queues"] and entry["id"] in confirmed
        }
        return [first.get(name, float("inf")) - at for name, at in due.items()]

    def check(self, what: str, value: float, limit: float) -> None:
        """State a figure that must be within a limit."""
        self.checks.append(Check(what, value, limit))

    def check_time(self, what: str, seconds: float, limit: float) -> None:
        """State a time that must be within a limit.

        In the short form, which runs beside other tests, the limit is `BUSY` at least.
        """
        self.check(what, seconds, max(limit, BUSY) if self.short else limit)

    def verdict(self) -> Verdict:
        """Judge the ledger as it is."""
        return judge(self.entries(), ahead=self.ahead)

    # -- how it is done ------------------------------------------------------------------------

    def new_book(self) -> Path:
        """Return the path of a new book, for a scenario that writes it itself."""
        return Path(self._book())

    def _book(self) -> str:
        self._books += 1
        return str(self.processes.folder / f"{self._books:03}.book")

    def _start(self, options: Publishing | Cancelling | Consuming) -> Program:
        log = Path(options.book).with_suffix(".log")
        env = {**os.environ, "PYTHONPATH": str(HERE), "PYTHONUNBUFFERED": "1"}
        program = Program(self.processes, self.processes.spawn(to_argv(options), env, log), log)
        self._programs.append(program)
        return program


def run_case(
    case: Case, root: str | None = None, *, short: bool = False, broker: Broker | None = None
) -> Outcome | None:
    """Run a scenario on a broker of its own, and judge it; None where that broker is too old.

    :param broker: one to run it on instead, for a case that changes nothing beyond its virtual
        host, which is deleted at the end.
    :raises ScenarioError: where the scenario could not be run to its end.
    """
    with ExitStack() as stack:
        processes = stack.enter_context(Processes("faults"))
        env = Environment(broker or _start(stack, case, root), processes, short=short)
        if broker is not None:
            stack.callback(env.vhost.delete)
            stack.callback(processes.close)  # before that
        if env.broker.release < case.since:
            return None
        version = env.broker.version  # of the one that it begins with, which may be gone at the end
        case.run(env)
        return Outcome(
            case,
            version,
            env.verdict(),
            tuple(env.checks),
            env.notes,
        )


def _start(stack: ExitStack, case: Case, root: str | None) -> Broker | Cluster:
    root = case.on() if case.on else root
    if case.nodes == 1:
        return stack.enter_context(Broker(root, case.config, case.advanced))
    return stack.enter_context(Cluster(root, case.config, case.advanced, size=case.nodes))
