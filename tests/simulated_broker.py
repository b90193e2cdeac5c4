"""A broker of exchanges, queues and bindings, on which the router's own commands run.

It routes and dead-letters as RabbitMQ does, and has no clock: a message is followed, through what
exists by then, to the queues in which it comes to rest. Each queue lets it go as soon as RabbitMQ
may: a quorum queue, which cuts times off to whole milliseconds, one millisecond before its TTL.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kombu_binary_delay.ladder.parts import Binding, Exchange, Part, Queue
from kombu_binary_delay.ladder.simulate import Wait, by_source, route_message
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

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kombu_binary_delay.routing.commands import Command, Steps

BUILT_IN = {"amq.direct": "direct", "amq.topic": "topic", "amq.fanout": "fanout"}


@dataclass(frozen=True)
class Rest:
    """Where a copy of a message came to rest, and where it waited on its way."""

    queue: str
    #: The exchange that it was published to last: by its publisher, or as a dead letter.
    exchange: str
    waits: tuple[Wait, ...]

    @property
    def waited(self) -> int:
        """All waits, in milliseconds."""
        return sum(wait.milliseconds for wait in self.waits)


class SimulatedBroker:
    """One virtual host."""

    def __init__(self) -> None:
        self.exchanges = {name: Exchange(name, kind) for name, kind in BUILT_IN.items()}
        self.queues: dict[str, Queue] = {}
        self.bindings: dict[Binding, None] = {}
        #: Queues that exist on a node that is down.
        self.out_of_reach: set[str] = set()
        #: Queues that are deleted when their last consumer leaves.
        self.auto_delete: set[str] = set()
        #: Queues whose arguments the user may not ask for.
        self.untold: set[str] = set()
        #: What was done, by kind, and what was written to the log.
        self.commands: list[Command] = []
        self.warnings: list[str] = []

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
                self.bindings.pop(binding, None)
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
        arguments = dict(queue.arguments)
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
                self.bindings.pop(binding, None)
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
            ends = self.queues if part.to_queue else self.exchanges
            if part.source not in self.exchanges or part.destination not in ends:
                return False
            self.bindings[part] = None
        elif isinstance(part, Queue):
            self._reach(part.name)
            assert self.queues.setdefault(part.name, part) == part, "inequivalent arguments"
        else:
            assert self.exchanges.setdefault(part.name, part) == part, "inequivalent arguments"
        return True

    def _reach(self, *queues: str) -> None:
        for name in self.out_of_reach.intersection(queues):
            raise OutOfReachError(name)

    def delete_exchange(self, name: str) -> None:
        """Delete an exchange, and all bindings from and to it."""
        self.exchanges.pop(name, None)
        for binding in list(self.bindings):
            if binding.source == name or (binding.destination == name and not binding.to_queue):
                del self.bindings[binding]

    def delete_queue(self, name: str) -> None:
        """Delete a queue, and all bindings to it."""
        self.queues.pop(name, None)
        for binding in list(self.bindings):
            if binding.destination == name and binding.to_queue:
                del self.bindings[binding]

    # -- messages ------------------------------------------------------------------------------

    def follow(self, exchange: str, keys: list[str], headers: Mapping[str, Any]) -> list[Rest]:
        """Publish a message and follow each copy of it until it rests."""
        rests: list[Rest] = []
        ahead: list[tuple[str, tuple[Wait, ...]]] = [(exchange, ())]
        while ahead:
            exchange, waits = ahead.pop()
            assert len(waits) <= len(self.queues), f"{keys} go round in a circle"
            for name in self._route(exchange, keys, headers):
                arguments = dict(self.queues[name].arguments)
                ttl, onward = (
                    arguments.get("x-message-ttl"),
                    arguments.get("x-dead-letter-exchange"),
                )
                if ttl is None or onward is None:
                    rests.append(Rest(name, exchange, waits))
                else:
                    cut_off = min(int(ttl), 1) if arguments.get("x-queue-type") == "quorum" else 0
                    ahead.append((str(onward), (*waits, Wait(name, int(ttl) - cut_off))))
        return rests

    def count(self, queue: str, rests: list[Rest]) -> int:
        """Count the copies in a queue."""
        return Counter(rest.queue for rest in rests)[queue]

    def _route(self, exchange: str, keys: list[str], headers: Mapping[str, Any]) -> set[str]:
        if not exchange:
            return {key for key in keys if key in self.queues}
        return route_message(self.exchanges, by_source(self.bindings), exchange, keys, headers)
