"""Compare the objects on a broker with the topology, and report the effect of each difference."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kombu_binary_delay.journal import stream_name
from kombu_binary_delay.ladder.defects import defects_of
from kombu_binary_delay.ladder.delay import PLUGIN_TYPE
from kombu_binary_delay.ladder.durations import human
from kombu_binary_delay.ladder.parts import Exchange, Part, Queue
from kombu_binary_delay.ladder.topology import Topology
from kombu_binary_delay.ladder.versions import (
    AMAZON,
    AMAZON_POLICY,
    OLDEST,
    STREAMS_ALWAYS_SINCE,
    release,
)
from kombu_binary_delay.schedules import Schedules
from kombu_binary_delay.settings import milliseconds

from .delivery import faults
from .errors import UnlistedError, UnreachableError
from .limits import limits
from .management import Management
from .remedy import (
    HERE,
    MAKE,
    PERMISSIONS,
    Place,
    grant,
    narrow,
    prefix_of,
    remake,
    stop_consumers,
    unbind,
)
from .scheduled import standstills
from .snapshot import Snapshot, arguments

#: An error loses or misroutes messages, or changes their delay; a warning may; a note only informs.
SEVERITIES = ("error", "warning", "note")


_NOTHING = Part()


@dataclass(frozen=True)
class Difference:
    """One difference from the topology, its effect, and what to do about it.

    ``remedy`` is empty if there is nothing to do.
    """

    severity: str
    what: str
    found: str
    causes: str
    remedy: str = ""


@dataclass(frozen=True)
class Verification:
    """All differences, the most severe first."""

    broker: str
    vhost: str
    ladder: str
    differences: tuple[Difference, ...]

    @property
    def sound(self) -> bool:
        """Whether there is neither an error nor a warning."""
        return not any(difference.severity != "note" for difference in self.differences)


def verify(  # noqa: PLR0913 - the last ones are what the settings and the asker say
    management: Management,
    topology: Topology,
    *,
    declares: bool = True,
    direct: bool = False,
    user: str | None = None,
    relays: Iterable[str] = (),
    must_exist: bool = False,
    drained: bool = False,
    amendments: Part = _NOTHING,
    schedules: Iterable[Schedules] = (),
    journal: Part = _NOTHING,
    lanes: Sequence[Topology] | None = None,
) -> Verification:
    """Compare a virtual host with a topology, and return the differences. Changes nothing.

    :param declares: whether applications declare missing parts, so that levels that no message has
        needed yet may be missing.
    :param direct: whether applications publish to direct queues, with ``queue_per_delay``.
    :param relays: glob patterns of the queues that need a relay, as in the setting.
    :param must_exist: whether it is an error if nothing of the ladder exists, because you asked
        for it by name.
    :param drained: whether applications do not publish to it, so that levels may be missing even
        if they declare nothing.
    :param amendments: the exchanges, queues and bindings of amendments, if they are enabled.
    :param schedules: as :func:`kombu_binary_delay.operate.scheduled` returns them.
    :param journal: the stream of the journal, if there is to be one.
    :param lanes: the ladders that programs use side by side, for which there must be room: by
        default, this one.
    :param user: the user whose permissions to check; by default, the API's user.
    :raises UnreachableError: if the management API does not answer.
    """
    overview = management.get("overview")
    version = str(overview.get("rabbitmq_version", ""))
    snapshot = Snapshot.read(management)
    place = Place(management.vhost, management.url, management.user)
    differences = [
        *_broker(management, version, topology),
        *compare(
            topology,
            snapshot,
            declares=declares or drained,
            direct=direct,
            must_exist=must_exist,
            place=place,
        ),
        *_delivery(topology, snapshot, relays, place),
        *dead_letters(topology, snapshot),
        *_amendments(amendments, snapshot, declares=declares),
        *_journal(journal, snapshot, declares=declares),
        *_policies(management, topology, snapshot, amendments + journal),
        *_limits(management, (topology,) if lanes is None else lanes, snapshot, user),
        *(
            Difference("error", what, state, "its tasks are not sent", remedy)
            for what, state, remedy in standstills(schedules)
        ),
        *_permissions(
            management,
            topology,
            user or management.user,
            amendments,
            _needed(topology, declares=declares, direct=direct and not drained),
        ),
    ]
    differences.sort(key=lambda difference: SEVERITIES.index(difference.severity))
    return Verification(version, management.vhost, topology.prefix, tuple(differences))


def levels_made(topology: Topology, snapshot: Snapshot) -> int:
    """Return the highest level of which a part exists; -1 for only the base, -2 for nothing."""
    parts = topology.parts()
    # Any part counts: a message in an entry exchange does not need the level's exchange yet.
    made = [
        level
        for level, part in parts.items()
        if any(exchange.name in snapshot.exchanges for exchange in part.exchanges)
        or any(queue.name in snapshot.queues for queue in part.queues)
    ]
    return max(made, default=-2)


def compare(  # noqa: PLR0913 - what the settings and the asker say
    topology: Topology,
    snapshot: Snapshot,
    *,
    declares: bool = True,
    direct: bool = False,
    must_exist: bool = False,
    place: Place = HERE,
) -> Iterator[Difference]:
    """Compare the exchanges, queues and bindings of the ladder side. Pure.

    :param direct: as in :func:`verify`, as are the others.
    :param place: the virtual host and API that the commands of remedies name.
    """
    # Programs that declare make what leads to direct queues when they need it.
    parts = topology.parts(direct=direct and not declares)
    top = levels_made(topology, snapshot)
    if must_exist and top < 0:
        yield Difference(
            "error",
            f"ladder {topology.prefix}",
            "nothing of it exists in this virtual host",
            "no message waits in it",
            "'status' lists the ladders that there are",
        )
        return
    for level, part in parts.items():
        if level > top:
            continue
        yield from _part(topology, part, snapshot, declares=declares, place=place)
    missing = [level for level in parts if level > top]
    if missing and declares:
        yield Difference(
            "note",
            f"levels {max(missing[0], 0)} to {missing[-1]}",
            "not made yet",
            "nothing: the first message that needs them makes them",
        )
    elif missing:
        yield Difference(
            "error",
            f"levels {max(missing[0], 0)} to {missing[-1]}",
            "missing",
            f"a publish with a delay of {human(_reach(topology, missing[0]))} or more fails "
            f"with 404",
            MAKE,
        )
    yield from _strangers(topology, snapshot, place)


def _delivery(
    topology: Topology, snapshot: Snapshot, relays: Iterable[str], place: Place
) -> Iterator[Difference]:
    for fault in faults(topology, snapshot, relays, place):
        yield Difference(fault.severity, fault.what, fault.found, fault.causes, fault.remedy)


def dead_letters(topology: Topology, snapshot: Snapshot) -> Iterator[Difference]:
    """Find dead letters that the delayed-message plugin would delay, and RabbitMQ does not. Pure.

    That is in exchanges to which programs publish delayed messages, or which are the plugin's. A
    queue with a TTL delays its dead letters itself.
    """
    into: dict[str, list[str]] = {}
    keyless: set[str] = set()
    for name, row in snapshot.queues.items():
        given = dict(row.get("effective_policy_definition") or {})
        given |= {key.removeprefix("x-"): value for key, value in arguments(row).items()}
        exchange = str(given.get("dead-letter-exchange") or "")
        if exchange and "message-ttl" not in given and not topology.owns(name):
            into.setdefault(exchange, []).append(name)
            if "dead-letter-routing-key" not in given:
                keyless.add(exchange)
    for exchange, queues in sorted(into.items()):
        is_plugins = snapshot.exchanges.get(exchange, {}).get("type") == PLUGIN_TYPE
        if is_plugins or (
            topology.is_ours and topology.mirror_name(exchange) in snapshot.exchanges
        ):
            more = f" and {len(queues) - 1} more" if len(queues) > 1 else ""
            key = ""
            if exchange in keyless:
                key = (
                    "; and without an x-dead-letter-routing-key it has the ladder's key, which no "
                    "direct or topic binding of yours matches"
                )
            yield Difference(
                "note",
                f"exchange {exchange}",
                f"what {queues[0]}{more} dead-letters goes there, as delayed messages do",
                "it is not delayed, whatever its x-delay is: only the delayed-message plugin does "
                f"that, and a program that backs off by it gets the message again at once{key}",
                "to back off, publish the message again with an x-delay, and acknowledge the first",
            )


def _reach(topology: Topology, level: int) -> int:
    return topology.ladder.weights[-1 - max(level, 0)]


def _part(
    topology: Topology, part: Part, snapshot: Snapshot, *, declares: bool, place: Place
) -> Iterator[Difference]:
    entry_exchanges = part.entry_exchanges
    for exchange in part.exchanges:
        # Programs that declare nothing enter by the levels.
        if declares or exchange.name in snapshot.exchanges or exchange.name not in entry_exchanges:
            yield from _exchange(topology, exchange, snapshot.exchanges.get(exchange.name))
    for queue in part.queues:
        yield from _queue(topology, queue, snapshot.queues.get(queue.name), place)
    for binding in part.bindings:
        known = binding.source in snapshot.exchanges and binding.destination in (
            snapshot.queues if binding.to_queue else snapshot.exchanges
        )
        if known and binding not in snapshot.bindings:
            kind = "queue" if binding.to_queue else "exchange"
            yield Difference(
                "error",
                f"binding from {binding.source} to the {kind} {binding.destination}",
                f"no binding with the key {binding.key!r}",
                _no_way(topology),
                MAKE,
            )


def _no_way(topology: Topology) -> str:
    if topology.parking:
        return "messages that should take it are parked, before they are due"
    return "messages that should take it are lost"


#: What an exchange of ours never is, and what that causes.
_FLAGS = {
    "internal": "no application may publish to it",
    "auto_delete": "it is gone with its last binding",
}


def _exchange(
    topology: Topology, exchange: Exchange, row: Mapping[str, Any] | None
) -> Iterator[Difference]:
    what, anew = f"exchange {exchange.name}", remake(topology)
    if row is None:
        yield Difference("error", what, "missing", _missing_exchange(topology, exchange), MAKE)
        return
    if row["type"] != exchange.type:
        is_type = f"its type is {row['type']}, not {exchange.type}"
        yield Difference("error", what, is_type, _no_way(topology), anew)
    if not row["durable"]:
        causes = "it is gone after a restart of the broker"
        yield Difference("error", what, "not durable", causes, anew)
    for flag, harm in _FLAGS.items():
        if row.get(flag):
            causes = f"{harm}; and applications that declare it cannot, so their publishes fail"
            yield Difference("error", what, flag.replace("_", "-"), causes, anew)
    wanted, given = dict(exchange.arguments), arguments(row)
    for name in wanted.keys() | given.keys():
        if wanted.get(name) != given.get(name):
            causes = "applications cannot declare it: their delayed publishes fail"
            if name == "alternate-exchange":
                causes = "a message without a destination holds up its level; and " + causes
            yield Difference("error", what, _other(name, wanted, given), causes, anew)


def _missing_exchange(topology: Topology, exchange: Exchange) -> str:
    if exchange.name == topology.parking:
        return "a message without a destination holds up its level: after dozens, nothing leaves it"
    if topology.is_ours and exchange.name == topology.direct:
        return "a delayed publish fails with 404"
    if topology.is_ours and exchange.name == topology.direct_fallback:
        return "messages with a delay that has no queue of its own are lost"
    if exchange.type == "fanout":
        return "a publish that enters there fails with 404"
    if topology.queue_type == "quorum":
        return "what leaves the level above cannot go on: after dozens, nothing leaves it"
    return "what leaves the level above is lost"


def _queue(
    topology: Topology, queue: Queue, row: Mapping[str, Any] | None, place: Place
) -> Iterator[Difference]:
    what, anew = f"queue {queue.name}", remake(topology)
    if row is None:
        causes = _no_way(topology)
        if queue.name == topology.parking:
            causes = "a message without a destination holds up its level, or is lost"
        yield Difference("error", what, "missing", causes, MAKE)
        return
    if not row["durable"] or row.get("auto_delete") or row.get("exclusive"):
        causes = "it goes away, and its messages with it"
        yield Difference("error", what, "not durable, or not to stay", causes, anew)
    wanted, given = dict(queue.arguments), arguments(row)
    given.setdefault("x-queue-type", row.get("type", "classic"))
    for name in sorted(wanted.keys() | given.keys()):
        if wanted.get(name, "classic" if name == "x-queue-type" else None) != given.get(name):
            causes = _ARGUMENTS.get(name, "")
            if name == "x-message-ttl":
                causes = _ttl(wanted.get(name), given.get(name))
            refused = "applications cannot declare it: their delayed publishes fail"
            yield Difference(
                "error",
                what,
                _other(name, wanted, given),
                "; and ".join(filter(None, [causes, refused])),
                anew,
            )
    if topology.prefix in queue.name and row.get("consumers"):
        causes = "they take messages before they are due"
        consumers = f"{row['consumers']} consumers"
        yield Difference("error", what, consumers, causes, stop_consumers(place))


_ARGUMENTS = {
    "x-dead-letter-exchange": "messages go elsewhere when they have waited",
    "x-dead-letter-routing-key": "messages lose their address, and are parked",
    "x-dead-letter-strategy": "messages can be lost between levels when a node crashes",
    "x-overflow": "messages can be lost between levels when a node crashes",
    "x-queue-type": "what survives a crash of a node is not what was asked for",
    "x-expires": "the queue is deleted when it is idle, with the messages that wait in it",
    "x-max-length": "a full queue refuses or drops messages",
    "x-max-length-bytes": "a full queue refuses or drops messages",
}


def _ttl(wanted: object, given: object) -> str:
    if wanted is None:
        return "what waits in it is lost when the time is over"
    if given is None:
        return "messages never leave it"
    return f"messages leave it {'early' if int(str(given)) < int(str(wanted)) else 'late'}"


def _other(name: str, wanted: Mapping[str, object], given: Mapping[str, object]) -> str:
    if name not in given:
        return f"has no {name}, should be {wanted[name]!r}"
    return f"{name} is {given[name]!r}, should be " + (
        repr(wanted[name]) if name in wanted else "left out"
    )


def _strangers(topology: Topology, snapshot: Snapshot, place: Place) -> Iterator[Difference]:
    """Yield bindings from the levels that are not part of the topology."""
    ours = {binding for part in topology.levels for binding in part.bindings}
    if topology.is_ours:
        ours |= {
            binding
            for level in range(topology.ladder.levels)
            for binding in topology.direct_bindings(level)
        }
    levels = {exchange.name for part in topology.levels for exchange in part.exchanges}
    for binding in sorted(snapshot.bindings - ours, key=repr):
        if binding.source in levels:
            yield Difference(
                "error",
                f"binding from {binding.source} to {binding.destination}",
                f"a binding with the key {binding.key!r} that is none of this ladder's",
                "messages that it matches get there before they are due, as well or only",
                unbind(place, binding),
            )


# -- amendments ----------------------------------------------------------------------------------

_OTHER_AGE = (
    "set amendments_max_age to what the stream has; or, with nothing cancelled that still waits, "
    "delete the stream and let 'verify --fix' make it"
)
_NOT_AMENDED = "a revoke does not outlive the workers, and to cancel or reschedule fails"


def _journal(part: Part, snapshot: Snapshot, *, declares: bool) -> Iterator[Difference]:
    for queue in part.queues:
        what = f"queue {queue.name}"
        if queue.name not in snapshot.queues:
            if not declares:
                causes = "what happens to delayed messages is not recorded"
                yield Difference("warning", what, "missing", causes, MAKE)
        else:
            given = arguments(snapshot.queues[queue.name])
            for name, other in _others(queue, given):
                causes = "programs with this setting cannot declare it, and record nothing"
                remedy = "delete the queue: the next program makes the stream that it should be"
                if not declares:
                    causes = "it is not as programs with this setting expect it"
                    remedy = f"delete the queue; then {MAKE}"
                if name == "x-max-age" and name in given:
                    causes = "events are kept for another time than this setting says"
                    remedy = "set journal_max_age to what the stream has"
                yield Difference("warning", what, other, causes, remedy)


def _amendments(part: Part, snapshot: Snapshot, *, declares: bool) -> Iterator[Difference]:
    named = [("exchange", exchange.name, snapshot.exchanges) for exchange in part.exchanges]
    named += [("queue", queue.name, snapshot.queues) for queue in part.queues]
    missing = [f"{kind} {name}" for kind, name, existing in named if name not in existing]
    if len(missing) == len(named):
        if named and declares:
            causes = "nothing: the first one makes the exchange and the streams that it needs"
            yield Difference("note", "amendments", "none made yet", causes)
        elif named:
            absent = "no exchange and no streams"
            yield Difference("warning", "amendments", absent, _NOT_AMENDED, MAKE)
        return
    for what in missing:
        yield Difference("error", what, "missing", _NOT_AMENDED, MAKE)
    for queue in part.queues:
        if queue.name in snapshot.queues:
            yield from _stream(queue, arguments(snapshot.queues[queue.name]))
    for binding in part.bindings:
        if binding not in snapshot.bindings and not missing:
            yield Difference(
                "error",
                f"binding from {binding.source} to the queue {binding.destination}",
                f"no binding with the key {binding.key!r}",
                _NOT_AMENDED,
                MAKE,
            )


def _stream(queue: Queue, given: Mapping[str, Any]) -> Iterator[Difference]:
    what, others = f"queue {queue.name}", dict(_others(queue, given))
    if "x-queue-type" in others:
        anew = f"delete the queue, which is no stream of ours; then {MAKE}"
        yield Difference("error", what, others["x-queue-type"], _NOT_AMENDED, anew)
        return
    for other in others.values():
        causes = "what was cancelled is remembered for another time than the settings say"
        yield Difference("warning", what, other, causes, _OTHER_AGE)


def _others(queue: Queue, given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the arguments of a stream that are not as they should be, and what they are."""
    wanted = dict(queue.arguments)
    for name in sorted(wanted):
        if wanted[name] != given.get(name):
            yield name, _other(name, wanted, given)


# -- the broker itself ---------------------------------------------------------------------------


def _broker(management: Management, version: str, topology: Topology) -> Iterator[Difference]:
    if release(version) < OLDEST:
        yield Difference(
            "error",
            f"RabbitMQ {version}",
            "a release that is not supported",
            "a quorum ladder cannot be made",
            f"upgrade RabbitMQ to {'.'.join(map(str, OLDEST))} or later",
        )
    elif topology.queue_type != "quorum":
        yield Difference(
            "note",
            "queue type",
            "the levels are classic queues",
            "a crash of a node can lose messages that are between two levels",
            "leave queue_type out",
        )
    elif release(version) < STREAMS_ALWAYS_SINCE:
        yield from _stream_flag(management)
    for known in defects_of(version):
        yield Difference("note", *known)


def _stream_flag(management: Management) -> Iterator[Difference]:
    name = "stream_queue"
    what = f"feature flag {name}"
    try:
        flags = management.get("feature-flags")
    except UnreachableError as exc:
        yield _unread(what, exc)
        return
    if any(flag["name"] == name and flag["state"] == "disabled" for flag in flags):
        yield Difference(
            "error",
            what,
            "disabled",
            "quorum queues dead-letter at most once: a crash loses messages between levels",
            f"rabbitmqctl enable_feature_flag {name}",
        )


def _unread(what: str, exc: UnreachableError) -> Difference:
    return Difference("note", what, "could not be read", "not compared", str(exc))


def _limits(
    management: Management, lanes: Sequence[Topology], snapshot: Snapshot, user: str | None
) -> Iterator[Difference]:
    if not lanes:
        return
    try:
        for limit in limits(management, lanes, snapshot, user or management.user):
            yield Difference("warning", *limit)
    except UnreachableError as exc:
        yield _unread("limits", exc)


# -- policies ------------------------------------------------------------------------------------


def _policies(
    management: Management, topology: Topology, snapshot: Snapshot, streams: Part
) -> Iterator[Difference]:
    wanted = {queue.name: dict(queue.arguments) for queue in topology.whole.queues}
    for name, row in snapshot.queues.items():
        if topology.owns(name):
            wanted.setdefault(name, arguments(row))
    for kind in ("policies", "operator-policies"):
        try:
            policies = management.here(kind)
        except UnreachableError as exc:
            yield _unread(kind, exc)
            continue
        if streams.queues and any(policy["name"] == AMAZON_POLICY for policy in policies):
            yield Difference(
                "error",
                f"operator-policy {AMAZON_POLICY}",
                "this is Amazon MQ, by another name of its host",
                f"{AMAZON}; the first revoke, cancellation or event would make one",
                "set amendments to False, and journal to a folder, in all programs",
            )
        yield from _hits(kind, policies, wanted, management.vhost, topology)


def _hits(
    kind: str,
    policies: Iterable[Mapping[str, Any]],
    wanted: Mapping[str, Mapping[str, Any]],
    vhost: str,
    topology: Topology,
) -> Iterator[Difference]:
    what, operator = kind.replace("ies", "y"), kind == "operator-policies"
    prefix = prefix_of(topology)
    remedies = {
        policy["name"]: narrow(vhost, policy, prefix, operator=operator) for policy in policies
    }
    journal = stream_name(topology.namespace)
    hit: dict[tuple[str, str, str, str], list[str]] = {}
    for queue, given in wanted.items():
        policy = _policy_of(queue, given, policies)
        if policy is None:
            continue
        breaks = _breaks if queue != journal else _shortens_journal
        for severity, key, causes in breaks(policy["definition"], given):
            hit.setdefault((severity, policy["name"], key, causes), []).append(queue)
    for (severity, name, key, causes), queues in hit.items():
        more = f" and {len(queues) - 1} more queues" if len(queues) > 1 else ""
        applies = f"{key} applies to {queues[0]}{more}"
        # How long to keep the journal is the operator's to decide.
        remedy = remedies[name] if severity != "note" else ""
        yield Difference(severity, f"{what} {name}", applies, causes, remedy)
    for policy in policies:
        if _matches(policy["pattern"], "") is None:
            yield _unjudged(f"{what} {policy['name']}", policy["pattern"], next(iter(wanted)))


def _unjudged(what: str, pattern: str, name: str) -> Difference:
    return Difference(
        "note",
        what,
        f"the pattern {pattern!r} cannot be judged here",
        "not compared",
        f"see for yourself whether it matches such names as {name}",
    )


def _policy_of(
    queue: str, given: Mapping[str, Any], policies: Iterable[Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    """Return the policy that RabbitMQ applies: the matching one with the highest priority."""
    kind = str(given.get("x-queue-type", "classic"))
    kinds = ("all", "queues", "streams" if kind == "stream" else f"{kind}_queues")
    matching = [
        policy
        for policy in policies
        if policy["apply-to"] in kinds and _matches(policy["pattern"], queue)
    ]
    return max(matching, key=lambda policy: policy["priority"], default=None)


def _matches(pattern: str, name: str) -> bool | None:
    """Return whether a RabbitMQ pattern matches; None if Python may read it unlike Erlang."""
    try:
        with warnings.catch_warnings():
            # For example about [[:alpha:]], which is a character class in Erlang.
            warnings.simplefilter("error")
            return re.search(pattern, name, re.ASCII) is not None
    except (re.error, Warning):
        return None


def _breaks(
    definition: Mapping[str, Any], given: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    """Yield a policy's effects on a queue with these arguments: severity, key and effect.

    Of two numbers, RabbitMQ uses the lower. For dead-letter exchanges and strategies, it uses the
    argument, so a policy changes nothing. For ``overflow``, a quorum queue uses the policy's value,
    and a classic queue the argument.
    """
    if given.get("x-queue-type") == "stream":
        yield from _shortens_amendments(definition, given)
        return
    declared = given.get("x-message-ttl")
    ttl = definition.get("message-ttl")
    if ttl is not None and declared is None:
        yield "error", "message-ttl", "parked messages are lost when the time is over"
    elif ttl is not None and int(ttl) < int(str(declared)):
        yield (
            "error",
            "message-ttl",
            "messages leave early: of two times, RabbitMQ takes the shorter",
        )
    if "expires" in definition:
        yield "error", "expires", _ARGUMENTS["x-expires"]
    quorum = given.get("x-queue-type") == "quorum"
    overflow = (given.get("x-overflow"), definition.get("overflow"))
    refuses = next(filter(None, overflow[::-1] if quorum else overflow), None) == "reject-publish"
    at_least_once = given.get("x-dead-letter-strategy") == "at-least-once"
    if "overflow" in definition and at_least_once and not refuses:
        yield "error", "overflow", _ARGUMENTS["x-overflow"]
    for key in ("max-length", "max-length-bytes"):
        if key in definition:
            full = (
                "a full queue refuses messages: publishes fail, and levels above are held up"
                if refuses
                else "a full queue drops its oldest messages, or sends them on early"
            )
            yield "error", key, full
    if "dead-letter-routing-key" in definition and declared is not None:
        yield "error", "dead-letter-routing-key", _ARGUMENTS["x-dead-letter-routing-key"]
    if quorum and definition.get("delivery-limit") == 0:
        yield "warning", "delivery-limit", "redrive and migrate refuse to look at what is here"


def _shortens(
    severity: str, effect: str, definition: Mapping[str, Any], given: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    """Yield a policy's effects on a stream, which it may shorten: RabbitMQ uses the lower limit."""
    age, wanted = definition.get("max-age"), given.get("x-max-age")
    if age is not None and (wanted is None or milliseconds(age) < milliseconds(wanted)):
        yield severity, "max-age", effect
    if "max-length-bytes" in definition:
        yield severity, "max-length-bytes", effect


_shortens_amendments = partial(
    _shortens, "warning", "records are forgotten sooner: what was cancelled may run"
)
_shortens_journal = partial(
    _shortens, "note", "events are forgotten sooner: what waits for longer is not listed"
)


# -- permissions ---------------------------------------------------------------------------------


def _needed(topology: Topology, *, declares: bool, direct: bool) -> dict[str, list[str]]:
    """Return the names on which a publisher needs each permission."""
    if declares:
        parts = (topology.whole, topology.direct_base) if direct else (topology.whole,)
        names = [exchange.name for part in parts for exchange in part.exchanges]
        names += [queue.name for queue in topology.whole.queues]
        return dict.fromkeys(PERMISSIONS, names)
    levels = [topology.level_name(level) for level in range(topology.ladder.levels)]
    return {"write": [topology.direct] if direct else levels}


def _permissions(
    management: Management,
    topology: Topology,
    user: str,
    amendments: Part,
    needed: Mapping[str, Sequence[str]],
) -> Iterator[Difference]:
    try:
        rows = management.get("users", user, "permissions")
    except UnlistedError:
        # The API's own user has just logged in.
        own = user == management.user
        yield Difference(
            "note" if own else "error",
            f"permissions of {user}",
            "RabbitMQ has no such user",
            "not compared" if own else "it cannot connect",
            "check the name; a user of LDAP or OAuth is not listed",
        )
        return
    except UnreachableError as exc:
        yield _unread(f"permissions of {user}", exc)
        return
    mine = [row for row in rows if row["vhost"] == management.vhost]
    prefix = prefix_of(topology)
    if not mine:
        yield Difference(
            "error",
            f"permissions of {user}",
            "none in this virtual host",
            "it cannot connect",
            grant(management.vhost, user, None, dict.fromkeys(PERMISSIONS, (prefix,))),
        )
        return
    give = partial(grant, management.vhost, user, mine[0])
    lacked = {
        what: (prefix,)
        for what, on in needed.items()
        if any(_matches(mine[0][what] or "^$", name) is False for name in on)
    }
    for what, on in needed.items():
        # In permissions, an empty pattern matches nothing.
        pattern = mine[0][what] or "^$"
        if _matches(pattern, "") is None:
            yield _unjudged(f"permissions of {user}", pattern, on[0])
            continue
        lacking = [name for name in on if not _matches(pattern, name)]
        if lacking:
            more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
            yield Difference(
                "error",
                f"permissions of {user}",
                f"no {what} permission on {lacking[0]}{more}",
                "its delayed publishes fail"
                if what == "write"
                else "it cannot make the ladder, and its delayed publishes fail",
                give(lacked),
            )
    streams = [queue.name for queue in amendments.queues]
    lacking = [name for name in streams if _matches(mine[0]["read"] or "^$", name) is False]
    if lacking:
        # Behind another system's ladder, the streams have another prefix.
        theirs = f"{streams[0].partition('.')[0]}."
        yield Difference(
            "note",
            f"permissions of {user}",
            f"no read permission on {lacking[0]}",
            "where it consumes, what was cancelled runs",
            give({**lacked, "read": dict.fromkeys([*lacked.get("read", ()), theirs])}),
        )
