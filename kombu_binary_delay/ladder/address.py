"""Write digits and a destination as one routing key, and read them back. Pure.

An address is ``d.d...d.@.<exchange>.<routing key>``: one word of bits per digit, the *lowest
first*; the word ``@``; the exchange as exactly one word, an empty one for the default exchange;
then the words of the original routing key. A delay of ten seconds is 80 ticks of 125 ms, in binary
``01 01 00 00``; to the queue ``orders``, its address is ``00.00.01.01.@..orders``.

The lowest digit comes first so that each level finds its digit at a fixed place and leading zeros
need not be written: RabbitMQ matches a topic word by word at every hop, so short keys are cheap
hops. The ``@`` occurs nowhere else, so a binding ``#.@.<exchange>.<key>`` matches any number of
digits: everything behind the levels is the same for every ladder.

Words that a binding would read as a wildcard or as the mark are escaped with ``%`` and two
hexadecimal digits; so are ``%`` itself, a dot in an exchange's name, and a leading ``!``. The
mapping is one to one for each word. So a topic pattern that is escaped in the same way matches the
escaped key exactly where the original pattern matches the original key.

AMQP allows 255 bytes for an exchange and 255 for a key; an address has 255 for both. A name that
does not fit is replaced by ``!`` and a digest, and a header carries the destination. The key of a
topic exchange must stay readable to wildcards, so there a key that does not fit is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple
from urllib.parse import unquote

from kombu_binary_delay.errors import AddressError, shown

from .ladder import MAX_DIGITS, MAX_KEY

MARK = "@"
#: The bytes of a routing key that are left for the destination, with the mark.
ROOM = MAX_KEY - MAX_DIGITS

#: An address in any form, with its digits in any figures.
_ADDRESS = re.compile(r"((?:[0-9]+\.)*)(@!?)\.([^.]*)(?:\.(.*))?", re.DOTALL)
_DIGEST = re.compile(r"![0-9a-f]{40}")
#: A longer exchange word becomes a digest, so that there is always room for a key's digest.
_MAX_EXCHANGE_WORD = 64


class Destination(NamedTuple):
    """The exchange (``""`` is the default one) and the routing key that the publisher gave."""

    exchange: str
    routing_key: str


def check_names(exchange: object, routing_keys: Iterable[object]) -> None:
    """Check the destination of a message: AMQP and RabbitMQ have no others.

    :raises AddressError: if a name is not a string or has more than 255 bytes; or if that of an
        exchange, or of a queue at the default exchange, is no text.
    """
    named = [
        ("an exchange", exchange),
        *(("a routing key", routing_key) for routing_key in routing_keys),
    ]
    for what, name in named:
        if not isinstance(name, str):
            raise AddressError(f"{what} must be a string, got {shown(name)}")
        if name.isascii() and len(name) <= MAX_KEY:
            continue
        if (size := length(name)) > MAX_KEY:
            raise AddressError(
                f"{what} must have at most {MAX_KEY} bytes, got {size}: {shown(name)}"
            )
        if (name is exchange or not exchange) and not _is_text(name):
            raise AddressError(
                f"the name of an exchange or a queue must be text that UTF-8 can encode, got "
                f"{shown(name)}"
            )


def format_address(
    digits: tuple[str, ...],
    destination: Destination,
    *,
    topic: bool = False,
) -> str:
    """Write digits, highest first and without leading zeros, and a destination as a routing key.

    :param digits: each a word of bits, as :meth:`~kombu_binary_delay.Ladder.digits` returns them.
    :param topic: whether bindings may match the key with wildcards, so that it must stay readable.
    :raises AddressError: if a topic key does not fit.
    """
    return _prefix(digits) + route(destination, topic)


def parse_address(
    key: str, carried: Destination | None = None
) -> tuple[tuple[str, ...], Destination]:
    """Read digits and destination back from a routing key: the inverse of :func:`format_address`.

    This does not check whether a ladder has these digits;
    :meth:`Topology.parse <kombu_binary_delay.Topology.parse>` does.

    :param carried: the destination from the message's header; needed if the address has a digest.
    :raises AddressError: if ``key`` is not an address, or its digests are not those of ``carried``.
    """
    digits, destination = read_address(key, carried)
    if "".join(digits).strip("01"):
        raise AddressError(f"{key!r} is not an address of a ladder: its digits are not in bits")
    return digits, destination


def read_address(
    key: str, carried: Destination | None = None
) -> tuple[tuple[str, ...], Destination]:
    """Read an address whose digits may be written in any figures, bits or others.

    :param carried: as for :func:`parse_address`.
    :raises AddressError: if ``key`` is not an address, or its digests are not those of ``carried``.
    """
    match = _ADDRESS.fullmatch(key)
    if match is None:
        raise AddressError(f"{key!r} is not an address of a ladder")
    prefix, mark, word, words = match.groups()
    digits = tuple(prefix.split(".")[-2::-1])
    destination = _read_route(word, words, carried)
    if (
        (digits and not digits[0].strip("0"))
        or exchange_word(destination.exchange) != word
        or (destination.exchange and mark != MARK)
    ):
        raise AddressError(f"{key!r} is not an address in its standard spelling")
    return digits, destination


def has_digest(key: str) -> bool:
    """Whether an address may hold a digest, so that a header must carry its destination."""
    return ".!" in key


# Delays repeat, and so do their digits.
@lru_cache(maxsize=4096)
def _prefix(digits: tuple[str, ...]) -> str:
    return ".".join((*reversed(digits), ""))


@lru_cache(maxsize=1024)
def route(
    destination: Destination,
    topic: bool = False,  # noqa: FBT001, FBT002 - the cache takes twice as long for what is named
) -> str:
    """Write what follows the digits of an address: the mark, the exchange and the key.

    :raises AddressError: if a topic key does not fit.
    """
    exchange = f"{MARK}.{exchange_word(destination.exchange)}"
    text = exchange + key_words(destination.routing_key)
    if length(text) <= ROOM:
        return text
    if topic:
        given, left = (size - length(exchange) - 1 for size in (length(text), ROOM))
        raise AddressError(
            f"the routing key {destination.routing_key!r} takes {given} bytes; a delayed message "
            f"to the exchange {destination.exchange!r} has room for {left}; use a shorter key, "
            f"or declare the exchange on this connection if it is not a topic exchange"
        )
    return f"{exchange}.{digest(destination.routing_key)}"


@lru_cache(maxsize=1024)
def exchange_word(exchange: str) -> str:
    """Write an exchange's name as one word."""
    word = _escape(exchange).replace(".", "%2E")
    return word if length(word) <= _MAX_EXCHANGE_WORD else digest(exchange)


def key_words(routing_key: str) -> str:
    """Write the words of a literal routing key, each with a dot before it."""
    # RabbitMQ takes an empty key for a key without words.
    if not routing_key:
        return ""
    return "".join("." + _escape(word) for word in routing_key.split("."))


def key_forms(routing_key: str) -> list[str]:
    """Write a key in each form that it has in addresses: it depends on the exchange's word.

    An exchange may be bound to others, with shorter and longer names.
    """
    words, longest = key_words(routing_key), len(MARK) + 1 + _MAX_EXCHANGE_WORD
    forms = []
    if len(MARK) + 2 + length(words) <= ROOM:
        forms.append(words)
    if longest + length(words) > ROOM:
        forms.append(f".{digest(routing_key)}")
    return forms


def pattern_words(binding_key: str) -> str:
    """Write the words of a topic binding key, wildcards kept, each with a dot before it."""
    if not binding_key:
        return ""
    words = binding_key.split(".")
    return "".join("." + (word if word in ("*", "#") else _escape(word)) for word in words)


def digest(name: str) -> str:
    """Write a name of any length as one word of 41 bytes."""
    return "!" + blake2b(name.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()


def _escape(word: str) -> str:
    word = word.replace("%", "%25")
    if word in ("*", "#", MARK) or word.startswith("!"):
        return f"%{ord(word[0]):02X}{word[1:]}"
    return word


def length(text: str) -> int:
    """Return the bytes of a name, which py-amqp reads and writes with half pairs of surrogates."""
    return len(text.encode("utf-8", "surrogatepass"))


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


# Destinations repeat.
@lru_cache(maxsize=1024)
def _read_route(word: str, words: str | None, carried: Destination | None) -> Destination:
    """Read what follows the mark: the inverse of :func:`route`."""
    return Destination(_read_exchange(word, carried), _read_key(words, carried))


def _read_exchange(word: str, carried: Destination | None) -> str:
    if _DIGEST.fullmatch(word):
        return _carried(word, None if carried is None else carried.exchange)
    return unquote(word)


def _read_key(words: str | None, carried: Destination | None) -> str:
    if words is None:
        return ""
    if _DIGEST.fullmatch(words):
        return _carried(words, None if carried is None else carried.routing_key)
    key = unquote(words)
    if key_words(key) != f".{words}":
        raise AddressError(f"{words!r} is not a routing key in its standard spelling")
    return key


def _carried(word: str, name: str | None) -> str:
    if name is None or digest(name) != word:
        raise AddressError(f"the message has no header with the name behind the digest {word!r}")
    return name
