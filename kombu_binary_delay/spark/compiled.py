"""Make messages from templates of what ``send_task`` makes. Does not import Spark.

A kind is a task with its queue and its options. For each call, Celery computes the message and its
destination again, but only the id, the times and the arguments differ between calls, unless the
application's code changes more. So ``send_task`` makes the first message of a kind, and what it
passes to its producer becomes a template. ``send_task`` also makes the second message, which must
match the template. All others are filled in from the template, and are byte for byte what
``send_task`` would have made. If the application's code could change a message, ``send_task`` makes
all messages, for one of :data:`REASONS`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from types import FunctionType, MethodType
from typing import Any

import celery.app.amqp
import celery.app.base
import celery.app.routes
import celery.app.task
from celery import Celery, signals
from celery.app.routes import MapRoute, Router
from celery.backends.base import Backend
from celery.utils.functional import maybe_evaluate

#: Reasons why ``send_task`` makes a message; other code refers to them by index.
(
    PROTOCOL,
    APPLICATION,
    ROUTER,
    HANDLER,
    TASK,
    WORKER,
    HEADERS,
    EXPIRED,
    DIFFERENT,
) = range(9)
REASONS = (
    "task_protocol is not 2",
    "the application or its amqp has methods of its own",
    "a router of its own may look at the arguments",
    "a handler of before_task_publish may change the message",
    "the task has an apply_async of its own",
    "the publisher is a worker's task itself",
    "headers have a name of Celery's own",
    "it has expired already",
    "messages of its kind differ in more than their ids, times and arguments",
)
#: The most kinds that are kept, proven or not; each takes some 2 kB.
_KINDS = 10_000
#: The fields of an event that do not describe the task.
_OF_EVENTS = ("type", "hostname", "utcoffset", "pid", "clock", "timestamp")
_SCALARS = frozenset((int, float, bool))


@dataclass
class Call:
    """The arguments of one ``send_task`` call.

    :param options: ``queue``, ``exchange``, ``routing_key`` and ``priority``, if given.
    :param headers: the row's headers; None if it has none.
    """

    name: str
    task_id: str
    args: list[Any]
    kwargs: dict[str, Any]
    eta: datetime
    expires: datetime | None = None
    headers: dict[str, Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> tuple[Any, ...]:
        """What all calls of one template have in common."""
        get = self.options.get
        return (
            self.name,
            get("queue"),
            get("exchange"),
            get("routing_key"),
            get("priority"),
            self.headers is None,
            self.expires is None,
        )

    def send(self, app: Celery, producer: Any) -> None:
        """Call ``send_task``."""
        options = dict(self.options)
        if self.expires is not None:
            options["expires"] = self.expires
        if self.headers is not None:
            options["headers"] = self.headers
        app.send_task(
            self.name,
            args=self.args,
            kwargs=self.kwargs,
            task_id=self.task_id,
            eta=self.eta,
            producer=producer,
            **options,
        )


#: The arguments of a producer's publish: the body, and the options.
Published = tuple[Any, dict[str, Any]]


class Template:
    """The messages of one kind."""

    def __init__(self, app: Celery, call: Call, seen: list[Published]) -> None:
        """Make a template from what a producer was given for a call.

        :raises _DifferentError: if a template cannot be made from it.
        """
        self._app = app
        (_, _, self._embed), options = seen[0]
        self._options = options
        headers = options["headers"]
        own = call.headers or {}
        self._headers = {name: value for name, value in headers.items() if name not in own}
        create = app.amqp.create_task_message
        # Whether the headers show the arguments in Celery's default form.
        shown = create("", "", [0], {"a": 0}).headers
        is_usual = (shown["argsrepr"], shown["kwargsrepr"]) == ("[0]", "{'a': 0}")
        self._longest = app.amqp.argsrepr_maxsize if is_usual else 0
        self._longest_kwargs = app.amqp.kwargsrepr_maxsize if is_usual else 0
        on_call = app.backend.on_task_call
        is_none = getattr(on_call, "__func__", None) is Backend.on_task_call
        self._on_call = None if is_none or headers["ignore_result"] else on_call
        self._event: dict[str, Any] | None = None
        if len(seen) > 1:
            self._event = {k: v for k, v in seen[1][0].items() if k not in _OF_EVENTS}
            self._retry = {name: seen[1][1][name] for name in ("retry", "retry_policy")}
        self.check(call, seen)

    def check(self, call: Call, seen: list[Published]) -> None:
        """Compare what a producer was given for a call with what the template makes.

        :raises _DifferentError: if they differ.
        """
        (body, options), *events = seen
        filled, its_options = self.fill(call)
        # The time until the message expires has become shorter meanwhile.
        left = [of_message.pop("expiration", None) for of_message in (options, its_options)]
        same = (
            filled == body
            and its_options == options
            and list(its_options["headers"]) == list(options["headers"])
            and [expiration is None for expiration in left] == [call.expires is None] * 2
            and len(events) == (self._event is not None)
        )
        for event, _ in events:
            fields = {k: v for k, v in event.items() if k not in _OF_EVENTS}
            same = same and fields == self._fields(filled, its_options)
        if not same:
            raise _DifferentError

    def fill(self, call: Call) -> Published:
        """Return what ``send_task`` would pass to its producer."""
        args: Any = call.args or ()
        kwargs = call.kwargs or {}
        task_id = call.task_id
        headers = self._headers.copy()
        headers["id"] = headers["root_id"] = task_id
        headers["eta"] = call.eta.isoformat()
        argsrepr = _shown(args, self._longest)
        kwargsrepr = _shown(kwargs, self._longest_kwargs)
        if argsrepr is None or kwargsrepr is None:
            shown = self._app.amqp.create_task_message(task_id, call.name, args, kwargs).headers
            argsrepr, kwargsrepr = shown["argsrepr"], shown["kwargsrepr"]
        headers["argsrepr"] = argsrepr
        headers["kwargsrepr"] = kwargsrepr
        options = self._options.copy()
        if call.expires is not None:
            headers["expires"] = call.expires.isoformat()
            options["expiration"] = (call.expires - self._app.now()).total_seconds()
        if call.headers:
            headers.update(call.headers)
        options["headers"] = headers
        options["correlation_id"] = task_id
        return (args, kwargs, self._embed), options

    def publish(self, producer: Any, call: Call) -> None:
        """Publish as ``send_task`` does."""
        body, options = self.fill(call)
        # Kombu changes the headers when it compresses.
        headers = options["headers"]
        with producer.connection._reraise_as_library_errors():  # noqa: SLF001 - as send_task does
            if self._on_call is not None:
                self._on_call(producer, call.task_id)
            producer.publish(body, **options)
            if signals.after_task_publish.receivers:
                signals.after_task_publish.send(
                    sender=call.name,
                    body=body,
                    headers=headers,
                    exchange=options["exchange"],
                    routing_key=options["routing_key"],
                )
            if signals.task_sent.receivers:
                signals.task_sent.send(
                    sender=call.name,
                    task_id=headers["id"],
                    task=call.name,
                    args=body[0],
                    kwargs=body[1],
                    eta=headers["eta"],
                    taskset=headers["group"],
                )
            if self._event is not None:
                fields = self._fields(body, options)
                dispatcher = self._app.amqp._event_dispatcher  # noqa: SLF001 - as send_task does
                dispatcher.publish("task-sent", fields, producer, **self._retry)

    def _fields(self, body: Any, options: dict[str, Any]) -> dict[str, Any]:
        headers = options["headers"]
        own = {name: headers[name] for name in ("root_id", "eta", "expires")}
        shown = {"args": headers["argsrepr"], "kwargs": headers["kwargsrepr"]}
        return {**(self._event or {}), "uuid": headers["id"], **own, **shown}


class Compiler:
    """Publishes calls by templates if possible, otherwise by ``send_task``."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._reason = _reason_of_application(app)
        #: Names that a row's headers must not use.
        self._own = frozenset(
            () if self._reason is not None else app.amqp.create_task_message("", "").headers
        )
        self._kinds: dict[tuple[Any, ...], Template | int] = {}
        self._unproven: dict[tuple[Any, ...], tuple[str, Template]] = {}

    def publish(self, producer: Any, call: Call) -> int | None:
        """Publish a task.

        :param producer: its attribute ``seen`` is None, or a list to which it appends what it is
            given to publish.
        :returns: the index in :data:`REASONS` of the reason why ``send_task`` made the message;
            None if it came from a template.
        """
        kind = call.kind
        known = self._kinds.get(kind)
        if known is None:
            known = self._reason if self._reason is not None else _reason_of_task(self._app, call)
            if known is not None:
                self._keep(kind, known)
        reason = known if isinstance(known, int) else self._reason_of_row(call)
        if reason is not None:
            call.send(self._app, producer)
        elif isinstance(known, Template):
            known.publish(producer, call)
        else:
            self._learn(producer, call, kind)
        return reason

    def _reason_of_row(self, call: Call) -> int | None:
        if call.headers and not self._own.isdisjoint(call.headers):
            return HEADERS
        if call.expires is not None and call.expires < self._app.now():
            return EXPIRED
        return None

    def _learn(self, producer: Any, call: Call, kind: tuple[Any, ...]) -> None:
        """Publish by ``send_task``: the first call makes a template, the second proves it."""
        seen: list[Published] = []
        producer.seen = seen
        try:
            call.send(self._app, producer)
        finally:
            producer.seen = None
        first, template = self._unproven.get(kind, (None, None))
        try:
            if template is None:
                if len(self._unproven) >= _KINDS:
                    self._unproven.clear()
                self._unproven[kind] = call.task_id, Template(self._app, call, seen)
            # The same row may be sent again; it does not prove the template.
            elif first != call.task_id:
                template.check(call, seen)
                self._keep(kind, template)
        except (_DifferentError, LookupError, TypeError, ValueError):
            self._keep(kind, DIFFERENT)

    def _keep(self, kind: tuple[Any, ...], known: Template | int) -> None:
        if len(self._kinds) >= _KINDS:
            self._kinds.clear()
        self._unproven.pop(kind, None)
        self._kinds[kind] = known


class _DifferentError(Exception):
    """A message differs from its template."""


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
    return None if app.current_worker_task is None else WORKER


def _reason_of_task(app: Celery, call: Call) -> int | None:
    if signals.before_task_publish.has_listeners(call.name):
        return HANDLER
    # As in send_task, which does not need a finalized application.
    task = app._tasks.get(call.name)  # noqa: SLF001
    of_task = ("apply_async", "_get_exec_options")
    if task is not None and not all(_is_celerys(task, name, celery.app.task) for name in of_task):
        return TASK
    return None


def _is_celerys(owner: Any, name: str, module: Any) -> bool:
    """Return whether a method is Celery's: not overridden, replaced or wrapped."""
    method = getattr(owner, name)
    function = method.__func__ if type(method) is MethodType else method
    return type(function) is FunctionType and function.__globals__ is vars(module)


def _shown(values: Any, longest: int) -> str | None:
    """Return arguments as Celery's ``saferepr`` does; None if they are nested or too long."""
    if isinstance(values, dict):
        texts = []
        for name, value in values.items():
            text = _shown_scalar(value)
            if text is None:
                return None
            texts.append(f"{_shown_scalar(name)}: {text}")
        shown = "{" + ", ".join(texts) + "}"
    elif values:
        written = [_shown_scalar(value) for value in values]
        if None in written:
            return None
        shown = "[" + ", ".join(written) + "]"  # type: ignore[arg-type]
    else:
        shown = "()"
    # Nothing is cut off.
    return shown if len(shown) < longest else None


def _shown_scalar(value: Any) -> str | None:
    if type(value) is str:
        return "'" + value.replace("'", "\\'") + "'"
    if type(value) in _SCALARS:
        return str(value)
    return "None" if value is None else None
