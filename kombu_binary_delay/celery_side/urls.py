"""Keep the transport for every broker URL of a connection, and use TLS where a URL asks for it.

Kombu uses the transport that is given with a URL only for the first URL: at a failover, the scheme
of the next one decides, and ``amqp://`` means Kombu's own transport. Kombu also drops the scheme of
a URL that is given with a transport, so ``amqps://`` would connect without TLS. Therefore our
transports ask Kombu for the whole URL (``can_parse_url``), and :func:`read_urls` makes Kombu's
connections read it. This module must not import the transports.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote, urlsplit

from kombu import Connection
from kombu.transport import TRANSPORT_ALIASES, get_transport_cls, pyamqp
from kombu.utils.url import as_url, parse_url

from kombu_binary_delay.errors import SettingsError
from kombu_binary_delay.wire.mechanism import delays

from .patch import replace

#: The URL scheme that names our transport, once it is registered; with an ``s``, over TLS.
ALIAS = "binary-delay"
_SCHEMES = ("amqp", "pyamqp", ALIAS)
_SCHEME = re.compile(rf"(?:^|(?<=;))(?:{'|'.join(_SCHEMES)})(s?)://", re.IGNORECASE)


def is_broker_url(url: str) -> bool:
    """Whether our transports can connect to a URL."""
    if _SCHEME.match(url):
        return True
    scheme, has_scheme, _ = url.partition("://")
    named = TRANSPORT_ALIASES.get(scheme, "kombu.") if has_scheme else "kombu."
    # A transport of Kombu's may need a client that is not installed.
    return not str(named).startswith("kombu.") and delays(get_transport_cls(scheme))


def for_kombus_transport(url: str) -> tuple[str, dict[str, Any]]:
    """Rewrite a URL, or several separated by ``;``, for Kombu's own transport.

    :returns: the URL, and its TLS options as py-amqp names them; of several URLs, the options of
        the first that has any.
    """
    urls = _SCHEME.sub(r"amqp\1://", url).split(";")
    options = next(filter(None, map(_tls_options, urls)), {})
    return ";".join(map(_without_tls_options, urls)), options


def check_url(url: str) -> None:
    """Check the URL of a broker, or several separated by ``;``; a bare host name always passes.

    :raises ValueError: without a part of the URL, which has a password.
    """
    for part in url.split(";"):
        if "://" not in part and not set(part) & set(":/@"):
            continue
        if "://" not in part or not is_broker_url(part):
            shown = f", such as amqp://{part}//" if "@" not in part and "://" not in part else ""
            raise ValueError(
                "the broker must be a RabbitMQ, with a URL that begins with amqp:// or amqps://"
                + shown
            )
        try:
            parse_url(part)
        except (ValueError, KeyError) as exc:
            # Without the original message: it has a part of the password.
            raise ValueError(
                "the URL of the broker cannot be read; write what is special in its user, "
                "password and virtual host percent-encoded, such as %2F for a slash"
            ) from (exc if "@" not in part else None)


def check_scheme(url: str, transport: Any) -> None:
    """Check that ``transport`` can connect to a URL; a bare host name always passes.

    :raises SettingsError: for the scheme of another kind of broker.
    """
    if "://" in url:
        _is_tls(urlsplit(url).scheme, transport)


def as_uri(client: Any, *, include_password: bool, mask: str) -> str:
    """Format a connection's parameters as a URL, in the form of Kombu's own transport."""
    write: Any = as_url
    given = client.info()
    password = given["password"] if include_password else mask
    return str(
        write(
            "amqps" if client.ssl else "amqp",
            given["hostname"] or "localhost",
            given["port"],
            given["userid"],
            password() if callable(password) else password,
            quote(given["virtual_host"]),
            sanitize=not include_password,
            mask=mask,
        )
    )


def read_urls() -> None:
    """Make Kombu's connections read the URLs of our transports.

    Call this when a transport is imported: Kombu imports the transport while it creates the first
    connection, just before it reads the URL.
    """
    replace(Connection, "_init_params", _read_url)


def _read_url(init_params: Any) -> Any:
    def read_url(client: Any, **params: Any) -> None:
        # Kombu calls this when a connection is made, and when it fails over to another URL.
        is_new = "transport_cls" not in vars(client)
        initial = client._initial_params  # noqa: SLF001 - Kombu offers no other way
        named = initial["transport"]
        # Otherwise, Kombu has not loaded the transport yet.
        has_url = "://" in (params["hostname"] or "") and not client.uri_prefix
        transport = get_transport_cls(named) if has_url or not is_new else None
        if not delays(transport):
            init_params(client, **params)
            return
        given = initial["ssl"]
        if is_new:
            read = {name: value for name, value in parse_url(params["hostname"]).items() if value}
            scheme = read.pop("transport")
            options = read.pop("ssl", None)
            read["hostname"] = read.get("hostname")
            initial.update(read)
            params.update(read)
        else:
            scheme = params["transport"]
            options = params["ssl"] if params["ssl"] is not given else None
        aliases = _aliases(transport)
        # Kombu gives a host name in a list of URLs the transport of the connection.
        is_url = is_new or scheme != named or scheme in aliases
        if is_new or scheme not in aliases or named not in aliases:
            params["transport"] = named
        if is_url:
            is_secure = issubclass(get_transport_cls(params["transport"]), pyamqp.SSLTransport)
            asks = (scheme != named and _is_tls(scheme, transport)) or is_secure
            params["ssl"] = _tls_of_url(options, given, asks=asks)
            if not is_new:
                # Otherwise, Kombu keeps that of the URL before it.
                client.port = params["port"]
        else:
            # It uses TLS if the URL before it does.
            params["ssl"] = client.ssl
        if is_new:
            initial["ssl"] = params["ssl"]
        init_params(client, **params)

    return read_url


class _UrlsTLS(dict[str, Any]):
    """The TLS options of a URL, true if it asks for TLS.

    A copy of a connection gets it as a parameter, and must not take it for one of the user's, who
    asks for TLS at every URL.
    """

    asks = False

    def __bool__(self) -> bool:
        return self.asks


def _tls_of_url(options: dict[str, Any] | None, given: Any, *, asks: bool) -> Any:
    """Return the parameter ``ssl`` for a URL.

    :param options: in its query. A URL without any uses those of the first URL, if it asks for TLS.
    :param given: the parameter of the connection, or that of its first URL.
    :param asks: whether the scheme or the transport asks for TLS.
    """
    query = options or (given if isinstance(given, dict) else {})
    query = {_option(name): value for name, value in query.items()}
    if given and not isinstance(given, _UrlsTLS):
        return query or given
    tls = _UrlsTLS(query)
    tls.asks = asks or bool(options)
    return tls


def _aliases(transport: Any) -> tuple[str, str]:
    return transport.alias, f"{transport.alias}s"


def _is_tls(scheme: str, transport: Any) -> bool:
    schemes = {*_SCHEMES, transport.alias}
    if scheme not in schemes | {f"{known}s" for known in schemes}:
        raise SettingsError(
            f"the broker URL's scheme is {scheme!r}, but {transport.__name__} connects to RabbitMQ "
            f"only: use amqp:// or amqps://, or leave the transport out (Celery: broker_transport) "
            f"so that Kombu chooses it by the scheme"
        )
    return scheme not in schemes


def _tls_options(url: str) -> dict[str, Any]:
    given = parse_url(url).get("ssl") or {} if "://" in url else {}
    return {_option(name): value for name, value in given.items()}


def _without_tls_options(url: str) -> str:
    place, mark, query = url.partition("?")
    kept = "&".join(option for option in query.split("&") if not option.startswith("ssl_"))
    return f"{place}{mark}{kept}" if kept else place


def _option(name: str) -> str:
    # In a URL's query, Kombu leaves its ``ssl_`` before the name that amqp knows.
    return name if name == "ssl_version" else name.removeprefix("ssl_")
