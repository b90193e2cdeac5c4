"""Error messages about a broker: what failed, and what to change."""

from __future__ import annotations

import errno
import re
import shlex
import ssl
from typing import Any, Protocol

import amqp
from kombu import Connection
from kombu.exceptions import OperationalError

#: The errors that Kombu raises if a broker does not answer, or refuses. An invalid character in a
#: host name raises UnicodeError.
BROKER_ERRORS = (amqp.AMQPError, OperationalError, OSError, UnicodeError)
#: The name of the default URL, if neither an option nor a variable nor an app names a broker.
NOTHING = "the default"
_PORT, _TLS_PORT = 5672, 5671
#: The numbers of errors that a file raises, and a connection does not.
_OF_FILES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)

_FREE = {"connection": "close other connections", "queue": "delete queues that nothing needs"}


class Target(Protocol):
    """A broker that is in use."""

    @property
    def option(self) -> str:
        """The option or setting that names the broker."""

    def plain(self) -> Any:
        """Return a connection by Kombu's own transport."""


def in_words(exc: BaseException, *targets: Target) -> str:
    """Return a message about an error between this program and a broker.

    :param exc: the error that Kombu, py-amqp or the operating system has raised.
    :param targets: the brokers that were in use.
    """
    exc = _cause(exc)
    if (local := of_this_machine(exc)) is not None:
        return local
    one = targets[0] if len(targets) == 1 else None
    places = " or ".join(_place(target) for target in targets)
    if isinstance(exc, amqp.AMQPError):
        return _refused(exc, places, one)
    said = getattr(exc, "strerror", None) or str(exc) or type(exc).__name__
    if isinstance(exc, ssl.SSLError):
        return (
            f"no TLS with RabbitMQ at {places}: {said}; amqps:// is for its TLS port, {_TLS_PORT} "
            f"by default, and amqp:// for the plain one{_other(one)}"
        )
    if isinstance(exc, ConnectionResetError) or "closed" in said:
        return (
            f"what listens at {places} closed the connection: {said}; RabbitMQ's port for AMQP is "
            f"{_PORT} by default, and {_TLS_PORT} for amqps://{_other(one)}"
        )
    remedy = f"; start it{_other(one).replace('; ', ', or ').replace('change', 'correct')}"
    return f"no RabbitMQ answers at {places}: {said}{remedy if one else ''}"


def of_this_machine(exc: BaseException) -> str | None:
    """Return a message about an error of a file or of the output; None for a broker's error."""
    if isinstance(exc, OSError) and exc.filename is not None:
        return f"{exc.filename}: {exc.strerror}"
    if isinstance(exc, OSError) and exc.errno in _OF_FILES:
        return f"the output cannot be written: {exc.strerror}"
    # The encoding of the name of a host is the broker's.
    if isinstance(exc, UnicodeEncodeError) and exc.encoding != "idna":
        text = exc.object[exc.start : exc.end]
        remedy = "set PYTHONIOENCODING=utf-8" if exc.encoding != "utf-8" else "give names in UTF-8"
        return f"{text!a} cannot be written in {exc.encoding}: {exc.reason}; {remedy}"
    return None


def to_raise_a_limit(said: str, vhost: str, user: str = "") -> str | None:
    """Return what to do about a limit of connections or queues; None if an error names none.

    :param said: RabbitMQ's text, such as "queue limit in vhost 'shop' (9) is reached".
    """
    limit = re.search(r"((?:node|user) )?(connection|queue) limit (in cluster)?", said)
    if limit is None:
        return None
    whose, what, in_cluster = limit.groups()
    if whose == "user ":
        by = f"""set_user_limits {shlex.quote(user)} '{{"max-connections": NUMBER}}'"""
    elif whose or in_cluster:
        return f"{_FREE[what]}, or raise this limit in the rabbitmq.conf of its nodes"
    else:
        # It replaces all limits of the virtual host.
        by = f"""set_vhost_limits -p {shlex.quote(vhost)} '{{"max-{what}s": NUMBER, …}}'"""
    return f"{_FREE[what]}, or raise this limit with: rabbitmqctl {by}"


def _refused(exc: amqp.AMQPError, places: str, target: Target | None) -> str:
    said = str(exc.reply_text or exc)
    if target is None or exc.reply_code not in (403, 530):
        return f"RabbitMQ at {places} ended it: {said}"
    connection = target.plain()
    vhost, user = connection.virtual_host or "/", connection.userid or "guest"
    broker, change = f"RabbitMQ at {_hosts(target)}", _other(target)
    or_change = change.replace("; ", "; or ")
    permissions = (
        f"'rabbitmqctl set_permissions -p {shlex.quote(vhost)} {shlex.quote(user)} CONFIGURE WRITE "
        f"READ', each a pattern of names"
    )
    if "Login was refused" in said:
        local = connection.hostname in (None, "localhost", "127.0.0.1", "::1")
        guest = "" if local or user != "guest" else ", which may log in on its own machine only"
        return f"{broker} refuses the user {user!r} or its password{guest}{change}"
    remedy = to_raise_a_limit(said, vhost, user)
    if remedy is None and "not found" in said:
        return (
            f"{broker} has no virtual host {vhost!r}; make it with 'rabbitmqctl add_vhost "
            f"{shlex.quote(vhost)}'{or_change}"
        )
    if remedy is None and "access to vhost" in said:
        return (
            f"{broker} does not let the user {user!r} into the virtual host {vhost!r}; give it "
            f"permissions with {permissions}{or_change}"
        )
    if remedy is None and exc.reply_code == 403:
        remedy = f"give it the permission with {permissions}{or_change}"
    return f"RabbitMQ at {places} refuses: {said}" + (f"; {remedy}" if remedy else change)


def _cause(exc: BaseException) -> BaseException:
    """Return the original error behind one of Kombu's."""
    while (
        not isinstance(exc, (amqp.AMQPError, OSError, UnicodeError)) and exc.__cause__ is not None
    ):
        exc = exc.__cause__
    return exc


def _place(target: Target) -> str:
    """Return hosts and ports, virtual host and user as text, never a password."""
    first = target.plain()
    return (
        f"{_hosts(target)} (virtual host {first.virtual_host or '/'}, "
        f"user {first.userid or 'guest'})"
    )


def _hosts(target: Target) -> str:
    first = target.plain()
    several = [Connection(url, ssl=first.ssl) for url in first.alt] or [first]
    return ", ".join(
        f"{connection.hostname or 'localhost'}:{_port(connection)}" for connection in several
    )


def _port(connection: Connection) -> int:
    return connection.port or (_TLS_PORT if connection.ssl else _PORT)


def _other(target: Target | None) -> str:
    """Return which option or setting to change, as text."""
    if target is None:
        return ""
    if target.option == NOTHING:
        return "; name the broker with --broker, BINARY_DELAY_BROKER or --app"
    return f"; change {target.option}"
