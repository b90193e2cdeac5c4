"""The kit's broker in memory, on which a router's own commands run.

Each queue lets a message go as soon as RabbitMQ may: a quorum queue, which cuts times off to whole
milliseconds, one millisecond before its TTL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kombu_binary_delay.ladder.parts import Binding, Exchange, Part, Queue
from kombu_binary_delay.routing.commands import (
    Answer,
    AskTemporary,
    AskType,
    Delete,
    Ensure,
    Look,
    OutOfReachError,
    Pause,
    Unbind,
    Warn,
)
from kombu_binary_delay.testing.broker import HEADERS, Broker, BrokerError, Message

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kombu_binary_delay.routing.commands import Command, Steps


class Rest(NamedTuple):
    """Where a copy of a message came to rest."""

    queue: str
    #: The exchange that it was published to last: by its publisher, or as a dead letter.
    exchange: str
    #: In milliseconds.
    waited: int


class SimulatedBroker(Broker):
    """One virtual host. Time passes only while a message is followed."""

    #: Those of plugins route as a direct exchange does.
    types = (*Broker.types, "x-consistent-hash", "x-hash")

    def __init__(self) -> None:
        super().__init__(0)
        #: Queues that exist on a node that is down.
        self.out_of_reach: set[str] = set()
        #: Queues that are deleted when their last consumer leaves.
        self.auto_delete: set[str] = set()
        #: Queues whose arguments the user may not ask for.
        self.untold: set[str] = set()
        #: What was done, by kind, and what was written to the log.
        self.commands: list[Command] = []
        self.warnings: list[str] = []

    def all_bindings(self) -> set[Binding]:
        """Return all bindings."""
        return {binding for bindings in self.bindings.values() for binding in bindings}

    # -- the commands of a router --------------------------------------------------------------

    def run(self, steps: Steps) -> list[Command]:
        """Do commands, one after the other, and return them."""
        done: list[Command] = []
        answer: Any = None
        error: OutOfReachError | None = None
        try:
            while True:
                command = steps.send(answer) if error is None else steps.throw(error)
                done.append(command)
                answer = error = None
                try:
                    answer = self.do(command)
                except OutOfReachError as exc:
                    error = exc
        except StopIteration:
            return done
        finally:
            self.commands += done

    def do(self, command: Command) -> Any:
        """Do one command, and return its answer."""
        if isinstance(command, Warn):
            self.warnings.append(command.text)
        elif isinstance(command, Pause):
            pass  # nothing happens by itself here
        elif isinstance(command, Look | AskType | AskTemporary):
            return self._ask(command)
        elif isinstance(command, Ensure):
            return self.declare(command.part)
        elif isinstance(command, Unbind):
            for binding in command.bindings:
                self.unbind(binding)
        else:
            assert isinstance(command, Delete)
            for name in command.exchanges:
                self.delete_exchange(name)
            for name in command.queues:
                self.delete_queue(name)
        return Answer.DONE

    def _ask(self, command: Look | AskType | AskTemporary) -> Any:
        if isinstance(command, AskType):
            exchange = self.exchanges.get(command.exchange)
            return Answer.MISSING if exchange is None else exchange.type
        if isinstance(command, AskTemporary):
            return self._is_temporary(command.queue)
        return self._look(command)

    def _is_temporary(self, name: str) -> bool:
        queue = self.queues.get(name)
        if queue is None or name in self.untold | self.out_of_reach:
            return False
        arguments = queue.arguments
        ends = name in self.auto_delete or "x-expires" in arguments
        return ends and not str(arguments.get("x-overflow")).startswith("reject-publish")

    def _look(self, command: Look) -> Answer:
        # In the order of the executor.
        if not self.exchanges.keys() >= {*command.exchanges}:
            return Answer.MISSING
        self._reach(*command.queues)
        if not self.queues.keys() >= {*command.queues}:
            return Answer.MISSING
        answer = self.declare(Part(bindings=command.bindings))
        if answer is Answer.DONE:
            for binding in command.others:
                self.unbind(binding)
        return answer

    # -- what programs declare and delete ------------------------------------------------------

    def declare(self, part: Part) -> Answer:
        """Declare all of a part up to the first binding whose ends do not exist."""
        for declared in part.in_order():
            if not self.declare_one(declared):
                return Answer.MISSING
        return Answer.DONE

    def declare_one(self, part: Exchange | Queue | Binding) -> bool:
        """Declare one thing; return False for a binding whose ends do not exist."""
        if isinstance(part, Binding):
            self._reach(part.destination)
            try:
                self.bind(part)
            except BrokerError:
                return False
        elif isinstance(part, Queue):
            self._reach(part.name)
            self.declare_queue(part.name, dict(part.arguments))
        else:
            self.declare_exchange(part.name, part.type, dict(part.arguments), (True, False, False))
        return True

    def _reach(self, *queues: str) -> None:
        for name in self.out_of_reach.intersection(queues):
            raise OutOfReachError(name)

    def _use(self, queue: Any) -> None:
        """Let no queue end by itself."""

    # -- messages ------------------------------------------------------------------------------

    def follow(self, exchange: str, keys: list[str], headers: Mapping[str, Any]) -> list[Rest]:
        """Publish a message and follow each copy of it until it rests."""
        begin, rests = self.now, []

        def enter(queue: Any, message: Message) -> None:
            if not {"x-message-ttl", "x-dead-letter-exchange"} <= queue.arguments.keys():
                rests.append(Rest(queue.name, message.exchange, (self.now - begin) // 1000))
                queue.ready.clear()

        self.on_enqueue = [enter]
        self._route(Message(b"", {HEADERS: dict(headers)}, exchange, keys))
        for _ in range(10 * len(self.queues)):
            self.run_until(self.next_event() or self.now)
        assert self.next_event() is None, f"{keys} go round in a circle"
        return rests
