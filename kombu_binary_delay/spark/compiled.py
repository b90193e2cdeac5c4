"""Make messages by templates of what ``send_task`` makes. Does not import Spark.

A kind is a task with its queue and its options. For each call, Celery computes the message and its
destination again, but only the id, the times and the arguments differ between calls, unless the
application's code changes more. So ``send_task`` makes the first message of a kind, and a
:class:`.publishing.template.Template` of it makes the others. ``send_task`` also makes the second
one, which must be that of the template, byte for byte. If the application's code could change a
message or wants to hear of it, ``send_task`` makes all messages, for one of :data:`REASONS`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import celery.app.amqp
import celery.app.base
import celery.app.routes
import celery.app.task
import kombu.utils.json
from celery import Celery, signals
from celery.app.routes import MapRoute, Router
from celery.backends.base import Backend
from celery.utils.functional import maybe_evaluate
from kombu.compression import compress
from kombu.serialization import dumps, registry

from kombu_binary_delay.errors import DelayError
from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.ladder.envelope import HEADERS as IN_PROPERTIES
from kombu_binary_delay.publishing.frames import encode
from kombu_binary_delay.publishing.template import EXPIRATION, Run, Template

from . import schema as s
from .rows import KindOf, Row

#: Reasons why ``send_task`` makes a message; other code refers to them by index.
(
    PROTOCOL,
    APPLICATION,
    ROUTER,
    HANDLER,
    EVENT,
    TASK,
    WORKER,
    HEADERS,
    EXPIRED,
    DIFFERENT,
) = range(10)
REASONS = (
    "task_protocol is not 2",
    "the application or its amqp has methods of its own",
    "a router of its own may look at the arguments",
    "a handler of before_task_publish, after_task_publish or task_sent is called for each message",
    "an event is sent with each message, by task_send_sent_event",
    "the task has an apply_async of its own",
    "the publisher is a worker's task itself",
    "headers have a name of Celery's own",
    "it has expired already",
    "messages of its kind differ in more than their ids, times and arguments",
)
#: The most kinds that are kept, proven or not; each takes some 2 kB.
_KINDS = 10_000
#: The headers and the property that differ between calls of a kind; ``expires``, too, if it is set.
_VARYING = ("id", "eta", "root_id", "argsrepr", "kwargsrepr")
_ID = "correlation_id"
_COMPRESSION = "compression"
#: What follows the arguments in a body, of a task without callbacks.
_EMBED = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
_EMBED_JSON = json.dumps(_EMBED)
#: The largest frame of any broker: what is compared here is not written.
_ANY_SIZE = 2**31
_SIGNALS = (signals.before_task_publish, signals.after_task_publish, signals.task_sent)
_NAMES = ("queue", "exchange", "routing_key")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_scan: Any = json.decoder.JSONDecoder().scan_once  # type: ignore[attr-defined] # of C


class Call(NamedTuple):
    """One ``send_task`` call.

    :param due: when the task is due, in microseconds since the epoch.
    :param headers: those of the row; None if it has none.
    """

    row: Row
    due: int
    headers: dict[str, Any] | None = None

    def send(self, app: Celery, producer: Any) -> None:
        """Call ``send_task``.

        :raises DelayError: if a name is too long for AMQP, or arguments are no JSON array or
            object.
        :raises ValueError: if they are no JSON.
        """
        row = self.row
        for name in _NAMES:
            if len(str(getattr(row, name) or "").encode()) > s.LONGEST_NAME:
                raise DelayError(f"{name} is longer than {s.LONGEST_NAME} bytes")
        options = {name: getattr(row, name) for name in (*_NAMES, "priority")}
        options["headers"] = self.headers
        options["expires"] = None if row.expires is None else _time(row.expires)
        [args], [kwargs] = _args([row.args]), _kwargs([row.kwargs])
        app.send_task(
            row.task,
            args=args,
            kwargs=kwargs,
            task_id=row.task_id,
            eta=_time(self.due),
            producer=producer,
            **{name: value for name, value in options.items() if value is not None},
        )


class Calls(NamedTuple):
    """Calls of one kind: of each, what differs from call to call, a column each.

    The columns of a row are as they are there; ``due`` and ``headers`` are those of :class:`Call`.
    """

    task_id: Sequence[str]
    args: Sequence[str | None]
    kwargs: Sequence[str | None]
    expires: Sequence[int | None]
    due: Sequence[int]
    headers: Sequence[dict[str, Any] | None]

    @classmethod
    def of(cls, call: Call) -> Calls:
        """Return one call."""
        row = call.row
        columns = [row.task_id], [row.args], [row.kwargs], [row.expires]
        return cls(*columns, [call.due], [call.headers])


#: The columns of a row that a call has.
CALLED = Calls._fields[:4]


class Made(NamedTuple):
    """A message that ``send_task`` has made."""

    body: Any
    properties: dict[str, Any]
    destination: Destination
    #: What is declared before it is published.
    declare: list[Any]


class Kind:
    """The messages of one kind.

    :param call: of one of them.
    :param made: that message.
    """

    def __init__(self, app: Celery, call: Call, made: Made) -> None:
        self._app, self.declare = app, made.declare
        self._expires = call.row.expires is not None
        self._has_headers = bool(call.row.headers)
        headers = made.properties[IN_PROPERTIES]
        same = {name: headers[name] for name in headers if name not in (call.headers or {})}
        self.names = frozenset(same)
        properties = {**made.properties, IN_PROPERTIES: same}
        for name in (_ID, EXPIRATION):
            properties.pop(name, None)
        exchange, key = made.destination
        #: As receipts have it.
        self.place = f"{exchange}/{key}" if exchange else key
        varying = {*_VARYING, "expires"} if self._expires else _VARYING
        self.template = Template(properties, made.destination, varying, _COMPRESSION)
        self._body = _encoder(properties, same.get(_COMPRESSION))
        create = app.amqp.create_task_message
        # Whether the headers show the arguments in Celery's default form.
        shown = create("", "", [0], {"a": 0}).headers
        is_usual = (shown["argsrepr"], shown["kwargsrepr"]) == ("[0]", "{'a': 0}")
        self._longest = app.amqp.argsrepr_maxsize if is_usual else 0
        self._longest_kwargs = app.amqp.kwargsrepr_maxsize if is_usual else 0
        on_call = app.backend.on_task_call
        is_none = getattr(on_call, "__func__", None) is Backend.on_task_call
        #: What the application's backend does before each publish; None if nothing.
        self.on_call = None if is_none or headers["ignore_result"] else on_call
        self.check(call, made)

    def check(self, call: Call, made: Made) -> None:
        """Compare a message that ``send_task`` has made with the template's.

        :raises _DifferentError: if they differ.
        """
        run = self.fill(Calls.of(call))
        if self._expires:
            # The time until the message expires has become shorter meanwhile.
            run.properties = {**run.properties, EXPIRATION: [made.properties.get(EXPIRATION)]}
        [header] = self.template.encode(run, slice(1), [None], run.further)
        ours = run.bodies[0], header
        theirs = encode(made.body, made.properties, _ANY_SIZE)
        where = self.template.destination, self.declare
        if (ours, where) != (theirs, (made.destination, made.declare)):
            raise _DifferentError

    def fill(self, calls: Calls) -> Run:
        """Return the messages of calls.

        :raises DelayError, ValueError: as :meth:`Call.send`, if the arguments of one cannot be
            read.
        """
        ids, due = calls.task_id, calls.due
        # An empty list is shown, and pickled, as none is.
        args = [values or () for values in _args(calls.args)]
        kwargs = _kwargs(calls.kwargs)
        argsrepr = [_shown_list(values, self._longest) for values in args]
        kwargsrepr = [_shown_dict(values, self._longest_kwargs) for values in kwargs]
        if None in argsrepr or None in kwargsrepr:
            create = self._app.amqp.create_task_message
            for place, shown in enumerate(zip(argsrepr, kwargsrepr, strict=True)):
                if None in shown:
                    made = create(ids[place], "", args[place], kwargs[place]).headers
                    argsrepr[place], kwargsrepr[place] = made["argsrepr"], made["kwargsrepr"]
        headers: dict[str, Sequence[Any]] = {
            "id": ids,
            "eta": list(map(_iso, due)),
            "root_id": ids,
            "argsrepr": argsrepr,
            "kwargsrepr": kwargsrepr,
        }
        properties: dict[str, Sequence[Any]] = {_ID: ids}
        if self._expires:
            expires, now = [moment or 0 for moment in calls.expires], self._app.now()
            headers["expires"] = list(map(_iso, expires))
            left = ((_time(moment) - now).total_seconds() for moment in expires)
            properties[EXPIRATION] = [str(int(seconds * 1000)) for seconds in left]
        further = [row or {} for row in calls.headers] if self._has_headers else None
        bodies = list(map(self._body, args, kwargs))
        return Run(
            self.template, bodies, due, headers=headers, properties=properties, further=further
        )


class Compiler:
    """Knows the kinds of messages of an application, and why a message is of none."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._reason = _reason_of_application(app)
        self._kinds: dict[KindOf, Kind | int] = {}
        self._unproven: dict[KindOf, tuple[str, Kind]] = {}

    def known(self, kind: KindOf) -> Kind | int | None:
        """Return the template of a kind, or why ``send_task`` must make its messages.

        It is an index in :data:`REASONS`. None if that is not known yet.
        """
        known = self._kinds.get(kind)
        if known is None:
            known = self._reason
            if known is None:
                known = _reason_of_task(self._app, kind[0])
            if known is not None:
                self._keep(kind, known)
        return known

    def way_of(
        self, known: Kind | None, headers: Mapping[str, Any] | None, expires: int | None
    ) -> Kind | int | None:
        """Return the same of one message of a kind, by its headers and when it expires."""
        if headers:
            create = self._app.amqp.create_task_message
            names = known.names if known is not None else create("", "").headers.keys()
            if not names.isdisjoint(headers):
                return HEADERS
        if expires is not None and _time(expires) < self._app.now():
            return EXPIRED
        return known

    def publish(self, producer: Any, kind: KindOf, call: Call, reason: int | None) -> None:
        """Publish a task whose message is of no kind that is known.

        :param producer: its attribute ``made`` is None, or a list to which it appends each
            :class:`Made` that it is given to publish.
        :param reason: why ``send_task`` must make it; None if its kind can be learnt from it.
        """
        if reason is not None:
            call.send(self._app, producer)
        else:
            self._learn(producer, kind, call)

    def _learn(self, producer: Any, kind: KindOf, call: Call) -> None:
        """Publish by ``send_task``: the first call makes a template, the second proves it."""
        seen = list[Made]()
        producer.made = seen
        try:
            call.send(self._app, producer)
        finally:
            producer.made = None
        first, template = self._unproven.get(kind, (None, None))
        try:
            [made] = seen
            if template is None:
                if len(self._unproven) >= _KINDS:
                    self._unproven.clear()
                self._unproven[kind] = call.row.task_id, Kind(self._app, call, made)
            # The same row may be sent again; it does not prove the template.
            elif first != call.row.task_id:
                template.check(call, made)
                self._keep(kind, template)
        except (_DifferentError, LookupError, TypeError, ValueError):
            self._keep(kind, DIFFERENT)

    def _keep(self, kind: KindOf, known: Kind | int) -> None:
        if len(self._kinds) >= _KINDS:
            self._kinds.clear()
        self._unproven.pop(kind, None)
        self._kinds[kind] = known


class _DifferentError(Exception):
    """A message differs from its template."""


def _json_encoder() -> Callable[[Any], str]:
    """Return ``json.dumps``, but for what that makes anew at each call, if it is CPython's."""
    make: Any = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return json.dumps
    escape, plain = json.encoder.encode_basestring_ascii, json.JSONEncoder()
    encode = make(None, plain.default, escape, None, ": ", ", ", False, False, True)
    return lambda value: "".join(encode(value, 0))


_to_json = _json_encoder()


def _encoder(
    properties: dict[str, Any], compression: str | None
) -> Callable[[Any, dict[str, Any]], bytes]:
    """Return what encodes the bodies of a kind, as its message has been."""
    kind, encoding = properties["content_type"], properties["content_encoding"]
    serializer = registry.type_to_name[kind]
    # Kombu makes an encoder for each message, which differs for no value that comes from JSON.
    is_json = registry._encoders[serializer].encoder is kombu.utils.json.dumps  # noqa: SLF001

    def encoded(args: Any, kwargs: dict[str, Any]) -> bytes:
        if is_json:
            text = f"[{_to_json(args)}, {_to_json(kwargs) if kwargs else '{}'}, {_EMBED_JSON}]"
        else:
            text = dumps((args, kwargs, _EMBED), serializer=serializer)[2]
        data: bytes = text.encode(encoding) if isinstance(text, str) else text
        return compress(data, compression)[0] if compression else data

    return encoded


def _reason_of_application(app: Celery) -> int | None:
    amqp = app.amqp
    if app.conf.task_protocol != 2:
        return PROTOCOL
    of_amqp = ("as_task_v2", "create_task_message", "send_task_message", "_create_task_sender")
    if not (
        _is_celerys(app, "send_task", celery.app.base)
        and all(_is_celerys(amqp, name, celery.app.amqp) for name in of_amqp)
    ):
        return APPLICATION
    router = amqp.router
    if not (
        type(router) is Router
        and _is_celerys(router, "route", celery.app.routes)
        and all(type(maybe_evaluate(route)) is MapRoute for route in router.routes)
    ):
        return ROUTER
    if app.conf.task_send_sent_event:
        return EVENT
    return None if app.current_worker_task is None else WORKER


def _reason_of_task(app: Celery, name: str) -> int | None:
    if any(signal.has_listeners(name) for signal in _SIGNALS):
        return HANDLER
    # As in send_task, which does not need a finalized application.
    task = app._tasks.get(name)  # noqa: SLF001
    of_task = ("apply_async", "_get_exec_options")
    if task is not None and not all(_is_celerys(task, name, celery.app.task) for name in of_task):
        return TASK
    return None


def _is_celerys(owner: Any, name: str, module: Any) -> bool:
    """Return whether a method is Celery's: not overridden, replaced or wrapped."""
    method = getattr(owner, name)
    function = method.__func__ if type(method) is MethodType else method
    return type(function) is FunctionType and function.__globals__ is vars(module)


def _shown_list(values: Sequence[Any], longest: int) -> str | None:
    """Return arguments as Celery's ``saferepr`` does; None if they are nested or too long."""
    if not values:
        return "()"
    try:
        shown = "[" + ", ".join([_SHOW[type(value)](value) for value in values]) + "]"
    except KeyError:
        return None
    # Nothing is cut off.
    return shown if len(shown) < longest else None


def _shown_dict(values: dict[str, Any], longest: int) -> str | None:
    """Return keyword arguments as :func:`_shown_list` does."""
    if not values:
        return "{}"
    try:
        texts = [
            f"{_SHOW[str](name)}: {_SHOW[type(value)](value)}" for name, value in values.items()
        ]
    except KeyError:
        return None
    shown = "{" + ", ".join(texts) + "}"
    return shown if len(shown) < longest else None


#: How each scalar is shown.
_SHOW: dict[type, Callable[[Any], str]] = {
    str: lambda text: "'" + text.replace("'", "\\'") + "'",
    **dict.fromkeys((int, float, bool, type(None)), repr),
}


def _args(texts: Sequence[str | None]) -> Sequence[list[Any]]:
    """Return the positional arguments of calls."""
    return _loaded(texts, "args", list, "array")


def _kwargs(texts: Sequence[str | None]) -> Sequence[dict[str, Any]]:
    """Return the keyword arguments of calls."""
    return _loaded(texts, "kwargs", dict, "object")


def headers_of(text: str | None) -> dict[str, Any] | None:
    """Return the headers of a row; None if it has none.

    :raises DelayError, ValueError: as :meth:`Call.send`, if they are no JSON object, or have a name
        that the row sets.
    """
    if text is None:
        return None
    headers: dict[str, Any]
    [headers] = _loaded([text], "headers", dict, "object")
    for name in s.RESERVED_HEADERS:
        if name in headers:
            raise DelayError(f'headers has "{name}", which is set by the row')
    return headers


def _loaded(texts: Sequence[str | None], name: str, kind: type, word: str) -> list[Any]:
    """Read a column of JSON; an empty one for a row without."""
    values = []
    for text in texts:
        if text is None:
            values.append(kind())
            continue
        # Without what json.loads does around it, for text without white space around it.
        try:
            value, end = _scan(text, 0)
        except StopIteration:
            end = -1
        if end != len(text):
            value = json.loads(text)
        if not isinstance(value, kind):
            raise DelayError(f"{name} must be a JSON {word}, got {text!r}")
        values.append(value)
    return values


def _time(micros: int) -> datetime:
    return _EPOCH + timedelta(microseconds=micros)


def _iso(micros: int) -> str:
    """Return the same as ``_time(micros).isoformat()``, in less time."""
    minutes, rest = divmod(micros, 60_000_000)
    seconds, rest = divmod(rest, 1_000_000)
    return f"{_minute(minutes)}{seconds:02}{f'.{rest:06}' if rest else ''}+00:00"


# Rows come in the order of their times.
@lru_cache(maxsize=1024)
def _minute(minutes: int) -> str:
    return (_EPOCH + timedelta(minutes=minutes)).isoformat()[:17]
