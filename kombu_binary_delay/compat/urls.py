"""Whichever broker URL a connection turns to, it keeps its transport, and TLS where asked for.

Kombu takes the transport named beside a URL for the first URL only: at a failover the scheme of the
next one decides, and ``amqp://`` means Kombu's own transport. And it drops the scheme of a URL that
has a transport beside it, so that ``amqps://`` would connect without TLS. It must not import the
transports: they hand themselves in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from kombu.transport import TRANSPORT_ALIASES
from kombu.utils.url import as_url, parse_url

_KOMBU_SCHEME = re.compile(r"(?:py)?amqp(s?)://", re.IGNORECASE)
_SCHEME = re.compile(r"(?:^|(?<=;))(?:binary-delay|pyamqp|amqp)(s?)://", re.IGNORECASE)


def is_amqp(url: str) -> bool:
    """Whether this is the URL of a broker, under one of Kombu's names for it or ours."""
    return _SCHEME.match(url) is not None


def stock(url: str) -> tuple[str, dict[str, Any]]:
    """Write a URL, or several with ``;`` between, so that Kombu chooses its own transport by it.

    Of what is named beside a URL Kombu takes no TLS, so the scheme is to say both.

    :returns: the URL, and what it says of TLS, in amqp's words; of several, the first that does.
    """
    urls = _SCHEME.sub(r"amqp\1://", url).split(";")
    said = next(filter(None, map(_tls, urls)), {})
    return ";".join(map(_without_tls, urls)), said


def _tls(url: str) -> dict[str, Any]:
    given = parse_url(url).get("ssl") or {} if "://" in url else {}
    return {_option(name): value for name, value in given.items()}


def _without_tls(url: str) -> str:
    place, mark, query = url.partition("?")
    kept = "&".join(each for each in query.split("&") if not each.startswith("ssl_"))
    return f"{place}{mark}{kept}" if kept else place


def enlist(transport: type, alias: str) -> None:
    """Let ``alias`` and, over TLS, ``alias`` with an ``s`` behind it name a transport in URLs."""
    aliases: dict[str, Any] = TRANSPORT_ALIASES
    for scheme in (alias, f"{alias}s"):
        # Kombu calls what is not a name.
        aliases[scheme] = lambda: transport


def settle(client: Any, transport: type, alias: str) -> None:
    """Read the URL that Kombu has left to the transport, and hold on to ``transport`` from here.

    :param client: the :class:`kombu.Connection` that has just made its transport.
    :param alias: the URL scheme that names ``transport``; with an ``s`` behind it, over TLS.
    """
    scheme = str(client.transport_cls)
    if "://" in (client.hostname or ""):
        read = {name: value for name, value in parse_url(client.hostname).items() if value}
        scheme = read.pop("transport")
        # Private, yet what Kombu does with the URL of a transport that leaves it to Kombu.
        client._initial_params.update(read, hostname=read.get("hostname"))  # noqa: SLF001 - see above
        given = {**client._initial_params, "transport": client.transport_cls}  # noqa: SLF001 - see above
        client._init_params(**given)  # noqa: SLF001 - see above
    if isinstance(client.ssl, dict):
        client.ssl = {_option(name): value for name, value in client.ssl.items()}
    if not client.ssl and scheme.lower() in ("amqps", "pyamqps", f"{alias}s"):
        client.ssl = True
    if client.cycle is not None and not isinstance(client.cycle, _Urls):
        enlist(transport, alias)
        client.cycle = _Urls(client.cycle, alias)
    if client.transport_cls in (alias, f"{alias}s"):
        # A copy of the connection may go where nobody has enlisted the alias.
        client.transport_cls = transport


def display(client: Any, *, include_password: bool, mask: str) -> str:
    """Write a connection's parameters as a URL."""
    write: Any = as_url
    password = client.password() if callable(client.password) else client.password
    return str(
        write(
            "amqps" if client.ssl else "amqp",
            client.hostname or "localhost",
            client.port,
            client.userid,
            (password if include_password else mask) if password else None,
            quote(client.virtual_host or "/", safe=""),
            sanitize=not include_password,
            mask=mask,
        )
    )


def _option(name: str) -> str:
    # In a URL's query, Kombu leaves its ``ssl_`` before the name that amqp knows.
    return name if name == "ssl_version" else name.removeprefix("ssl_")


class _Urls(Iterator[str]):
    """The URLs of a failover cycle, with our scheme in place of Kombu's."""

    def __init__(self, urls: Iterator[str], alias: str) -> None:
        self._urls = urls
        self._alias = alias

    def __next__(self) -> str:
        url = next(self._urls)
        return _KOMBU_SCHEME.sub(lambda scheme: f"{self._alias}{scheme[1]}://", url, count=1)
