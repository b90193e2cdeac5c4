"""Every decision of one connection. Pure.

For a publish, ``plans`` returns a :class:`Plan`; for a delivery, ``deliveries`` returns a
:class:`Delivery`; for what a program declares, binds or deletes, the router yields the commands to
run, see :mod:`.commands`. What the connection knows is in one :class:`.Knowledge`. Its set
``existing`` has what exists on the broker; a plan's needs are what is missing from it, which is
nearly always nothing.

The router holds the objects that decide about the parts, each of which takes that state:
:class:`.Levels` and :class:`.Routes` what to declare, :class:`.Checks` what to look at again,
:class:`.Plans` what to publish, and :class:`.Deliveries` how what comes was published. Nothing else
asks the first three. They must not do I/O, read a clock, or know Kombu, py-amqp or Celery.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from kombu_binary_delay.errors import DelayError, TopologyError
from kombu_binary_delay.ladder.delay import JITTER, due_time, jitter_of
from kombu_binary_delay.ladder.versions import OLDEST, is_since
from kombu_binary_delay.settings import Settings

from .checks import Checks
from .commands import Answer, Look, Steps, Warn, log_refusals
from .deliveries import Deliveries, Delivery
from .knowledge import (
    ATTEMPTS,
    BASE,
    BINDINGS,
    KINDS,
    LOOK_AGAIN,
    PATH,
    Knowledge,
    KnownQueue,
    Repetition,
    Shared,
    UserBinding,
    is_recent,
)
from .levels import Levels
from .plans import REPLY_TO, Plan, Plans
from .routes import Routes

__all__ = ["LOOK_AGAIN", "Delivery", "Plan", "Router"]


class Router:
    """The decisions of one connection.

    :param settings: of the transport.
    :param server: the properties that the broker sent when the connection opened.
    :param vhost: the virtual host that the connection is in.
    :param shared: with other connections.
    """

    def __init__(
        self,
        settings: Settings,
        server: Mapping[str, Any],
        vhost: str = "/",
        shared: Shared | None = None,
    ) -> None:
        self.known = known = Knowledge(settings, server, vhost, shared)
        self.topology = known.topology
        #: In milliseconds, for messages that do not say it themselves.
        self.jitter = settings.jitter
        #: Whether the first message relies on what another connection has found. Then its publisher
        #: waits until the broker has taken it.
        self.relies_on_others = False
        self._levels = levels = Levels(known)
        self._routes = routes = Routes(known, levels)
        self._checks = Checks(known, levels, routes)
        #: Answers publishes.
        self.plans = Plans(known)
        #: Reads deliveries.
        self.deliveries = Deliveries(known)
        #: What makes a need of each kind; its arguments are what the need names beside its kind.
        self._makers: dict[str, Callable[..., Steps]] = {
            "bindings": routes.repeat_all,
            "way": routes.bind_queue,
            "relay": routes.bind_by_relay,
            "target": routes.reach_exchange,
            "level": levels.declare_up_to,
            "direct": levels.declare_direct_queue,
        }

    def opened(self) -> Steps:
        """Warn about the guarantees that a new connection cannot give."""
        server = self.known.server
        if server.get("product", "RabbitMQ") != "RabbitMQ":
            yield Warn(
                f"{server['product']} {server.get('version', '')} is not RabbitMQ: whether delayed "
                f"messages keep their promises on it has not been tried",
                once=True,
            )
        if is_since(server, (0,)) and not is_since(server, OLDEST):
            yield Warn(
                f"RabbitMQ {server.get('version')} is not supported: delayed messages need "
                f"RabbitMQ {'.'.join(map(str, OLDEST))} or later",
                once=True,
            )
        if self.known.settings.queue_type == "classic":
            yield Warn(
                "delayed messages wait in classic queues, since queue_type is 'classic': a broker "
                "that crashes can lose messages that move between levels; use quorum queues",
                once=True,
            )

    def cut_off(self) -> None:
        """Forget what connections share: the broker of one that broke may come back without it."""
        self.known.shared.forget()

    # -- a publish -----------------------------------------------------------------------------

    def due(self, asked: Mapping[str, Any], now: int, name: str) -> int | None:
        """Return when a message is due, with its jitter; None if it asks for no delay.

        :param asked: the headers that ask for the delay.
        :param now: microseconds since the epoch, as the result.
        :param name: what decides the jitter of a message that has no task id.
        :raises DelayError: if the headers cannot be read, or the longest possible wait is longer
            than the ladder's maximum: whether a message is refused must not depend on its name.
        """
        due = due_time(asked, now, name)
        if due is None or JITTER not in asked:
            return due
        ladder = self.topology.ladder
        wait = max((due_time({**asked, JITTER: 0}, now) or now) - now, 0) / 1000
        jitter = jitter_of(asked) / 1000
        if wait <= ladder.maximum < wait + jitter:
            raise DelayError(
                f"{JITTER} of {jitter:.0f} ms on top of a delay of {wait:.0f} ms is longer than "
                f"{ladder.maximum} ms, the longest delay of the ladder {ladder.name}; use less "
                f"jitter, a shorter delay, or a ladder with more levels"
            )
        return due

    def prepare(self, needs: Iterable[tuple[Any, ...]], now: int) -> Steps:
        """Declare what a plan needs.

        :raises TopologyError: if the broker refuses.
        """
        known, needed = self.known, set(needs)
        if not known.declares:
            yield from self._look_for_first(needed)
            return
        losses_together = known.shared.losses
        if not known.looked and self._checks.rely_on_others(now):
            self.relies_on_others = True
        if not (known.looked and is_recent(known.looked, now)):
            yield from self._checks.look_again(now, is_first=not known.looked)
        for _ in range(ATTEMPTS):
            yield from known.pause_after_deletion()
            losses = known.losses
            for path in [need for need in self._missing(needed) if need[0] == PATH]:
                _, lane, digits = path
                queues = [need[1] for need in needed if need[0] == "way"]
                # Nobody whose look it relies on has looked at this path.
                begins = not self.relies_on_others
                if not (begins and (yield from self._checks.look_for_path(lane, digits, queues))):
                    needed.remove(path)
                    needed.add(("level", lane, known.ladders[lane].needs(digits)))
            for kind, *names in sorted(self._missing(needed), key=_place_in_order):
                yield from self._makers[kind](*names)
            if known.losses == losses:
                self._checks.share(losses_together)
                return
        raise TopologyError(
            f"a part of the ladder was deleted during {ATTEMPTS} attempts to declare it; stop the "
            f"program that deletes it, and publish again"
        )

    def _missing(self, needed: set[tuple[Any, ...]]) -> set[tuple[Any, ...]]:
        """Return the needs that are not met yet."""
        missing = needed - self.known.existing
        if self.known.repetition is Repetition.DONE:
            missing.discard(BINDINGS)
        return missing

    def _look_for_first(self, needed: Iterable[tuple[Any, ...]]) -> Steps:
        """Check that what the broker has reported as missing was made again, by an administrator.

        :raises TopologyError: if it was not: the broker would close the channel of a publish.
        """
        answer = Answer.DONE
        # A user that may not ask publishes, and sees.
        with suppress(TopologyError):
            answer = yield Look(tuple(exchange for _, exchange in needed))
        if answer is Answer.MISSING:
            names = " and ".join(repr(exchange) for _, exchange in needed)
            raise TopologyError(
                f"a delayed message needs {names}, which does not exist, and declare is 'never'; "
                f"make the ladder of these settings with kombu-binary-delay create"
            )
        self.known.existing.update(needed)

    def look(self, now: int) -> Steps:
        """Check that what a connection's consumers rely on still exists, if it was not lately.

        A connection that only consumes has no publish that would.
        """
        known = self.known
        relies = known.declares and (BASE in known.existing or self._checks.count)
        if relies and not is_recent(known.looked, now):
            queues = known.facts_of("way", "relay")
            yield from log_refusals(self._checks.look_again(now), once=True)
            yield from log_refusals(self.prepare({BINDINGS, *queues}, now), once=True)

    # -- what the program declares, binds and deletes ------------------------------------------

    def consuming(self) -> Steps:
        """Repeat what was bound so far for delayed messages: the connection begins to consume."""
        if self.relies_on_others:
            # A publish that waits could run the program's code. So the next one looks by itself.
            self.relies_on_others, self.known.looked = False, 1
        if self.known.declares:
            yield from self._routes.consuming()

    def declared_exchange(self, exchange: str, exchange_type: str) -> None:
        """Remember an exchange's type."""
        if exchange:
            self.known.exchanges.remember(exchange, exchange_type)

    def declared_queue(
        self,
        queue: str,
        arguments: Mapping[str, Any] | None,
        *,
        mailbox: bool = False,
        auto_delete: bool = False,
        is_in_use: bool = False,
    ) -> Steps:
        """Remember a queue, and bind it for delayed messages.

        :param mailbox: whether no other connection addresses it by its name.
        :param auto_delete: whether the broker deletes it when its last consumer leaves.
        :param is_in_use: whether it has messages or consumers, so that it is not a new queue.
        """
        if self.is_private(queue):
            return
        known = self.known
        overflow = str((arguments or {}).get("x-overflow"))
        rejects = overflow.startswith("reject-publish")
        before = known.queues.get(queue)
        if before is not None:
            before.is_temporary, before.is_mailbox = auto_delete, mailbox
        had_relay = known.needs_relay(queue)
        known.queues[queue] = KnownQueue(rejects, auto_delete, mailbox, not is_in_use)
        if not mailbox:
            known.declared[queue] = None
        # It may have created the queue again.
        known.existing -= {("way", queue), ("relay", queue)}
        # Bindings from before its arguments were known: all of a queue's go one way.
        again = known.bindings.of_queue(queue) if known.needs_relay(queue) != had_relay else []
        known.existing.difference_update(again)
        if rejects:
            yield from self._warn_of_overflow(queue, overflow)
        if not mailbox:
            yield from self._routes.run_after_call(self._routes.bind_queue(queue))
            for binding in again:
                yield from self._routes.run_after_call(self._routes.mirrors.repeat(binding))

    def _warn_of_overflow(self, queue: str, overflow: str) -> Steps:
        """Warn of what becomes of delayed messages that a queue rejects while it is full."""
        if self.topology.can_have_relays and overflow == "reject-publish-dlx":
            yield Warn(
                f"the queue {queue!r} dead-letters what it rejects while it is full "
                f"(reject-publish-dlx), and a delayed message is tried again until there is room: "
                f"each try is another copy; use the overflow reject-publish, or drop-head",
                once=True,
            )
        if self.topology.queue_type == "classic":
            yield Warn(
                f"the queue {queue!r} rejects messages while it is full: delayed messages "
                f"from classic queues are then lost; quorum queues keep them",
                once=True,
            )

    def knows_queue(self, queue: str, *, refuses: bool, temporary: bool) -> None:
        """Remember a queue that others declare.

        :param refuses: whether it may reject messages.
        :param temporary: whether the broker deletes it by itself.
        """
        known = self.known.queues.setdefault(queue, KnownQueue(refuses, temporary))
        known.rejects, known.is_temporary = refuses, temporary

    def bound(self, binding: UserBinding, arguments: Mapping[str, Any] | None = None) -> Steps:
        """Remember a binding, and repeat it if this connection delays or consumes."""
        if self._is_repeated(binding.exchange, binding.destination):
            self.known.bindings.add(binding, arguments)
            # The program may bind again because our bindings were deleted.
            mirrors = {("mirror", end) for end in binding.ends}
            self.known.existing -= {binding, *mirrors}
            yield from self._routes.run_after_call(self._routes.mirrors.repeat(binding))

    def unbound(self, binding: UserBinding, arguments: Mapping[str, Any] | None = None) -> Steps:
        """Remove what :meth:`bound` made, here or in another process."""
        is_repeated = self._is_repeated(binding.exchange, binding.destination)
        if is_repeated and self.known.bindings.remove(binding, arguments):
            self.known.shared.forget()
            if self.known.declares:
                yield from log_refusals(self._routes.mirrors.remove(binding))

    def left(self, queue: str) -> None:
        """Forget a queue that lost its last consumer here, if the broker deletes it then."""
        known = self.known.queues.get(queue)
        if known is not None and known.is_temporary:
            self._forget_queue(queue)

    def deleted_queue(self, queue: str) -> Steps:
        """Forget a queue, and remove the bindings of its relay, which the broker keeps."""
        bindings = self._forget_queue(queue)
        self.known.shared.forget()
        if self.known.declares and self.topology.can_have_relays:
            # The relay still exists, and would deliver to a new queue of the same name.
            for binding in bindings:
                yield from log_refusals(self._routes.mirrors.remove(binding))

    def deleted_exchange(self, exchange: str) -> Steps:
        """Remove the mirror of an exchange that is gone."""
        known = self.known
        known.shared.forget()
        known.exchanges.forget(exchange)
        if not self._is_repeated(exchange):
            return
        known.existing -= {("mirror", exchange), ("target", exchange)}
        self._forget([binding for binding in known.bindings if exchange in binding.ends])
        if known.declares:
            yield from log_refusals(self._routes.mirrors.delete(exchange))

    def _forget_queue(self, queue: str) -> list[UserBinding]:
        """Forget a queue, and return its bindings, which are forgotten as well."""
        self.known.declared.pop(queue, None)
        self.known.queues.pop(queue, None)
        self.known.existing -= {("way", queue), ("relay", queue)}
        bindings = self.known.bindings.of_queue(queue)
        self._forget(bindings)
        return bindings

    def _forget(self, bindings: Iterable[UserBinding]) -> None:
        for binding in bindings:
            self.known.bindings.discard(binding)
            self.known.existing.discard(binding)

    def _is_repeated(self, *names: str) -> bool:
        """Whether bindings between these names are repeated on the delivery side."""
        return self.topology.is_ours and not any(self.is_private(name) for name in names)

    def is_private(self, name: str) -> bool:
        """Whether a name is not followed: the ladder's, RabbitMQ's, Celery's control and events."""
        return (
            not name
            or self.topology.owns(name)
            or name.endswith(".pidbox")
            or name == "celeryev"
            or name.startswith(("celeryev.", REPLY_TO))
        )


def _place_in_order(need: tuple[Any, ...]) -> int:
    return KINDS.index(need[0])
