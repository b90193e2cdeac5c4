"""Digits and a destination, to and from one routing key. Pure.

An address is ``d.d...d.@<exchange>.<routing key>``: one word per digit, highest first; the
exchange as exactly one word that begins with ``@`` (no digit does, so an address can be read
without knowing its ladder); then the words of the original routing key. The default exchange,
whose name is empty, is a lone ``@``; an empty routing key has no words at all, as in RabbitMQ.

A word that a topic binding would read as a wildcard is escaped with ``%`` and two hexadecimal
digits, and so are ``%`` itself, a dot in an exchange's name, and a leading ``!``. Word by word the
mapping is one to one, hence a topic pattern matches the escaped key exactly where the pattern,
escaped alike, matches the original.

AMQP allows 255 bytes for an exchange and again for a key, an address has 255 for both. What does
not fit is replaced by ``!`` and a digest; then the destination travels beside the address, in a
header. A topic key must stay readable to wildcards, so there a key that does not fit is an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import blake2b
from urllib.parse import unquote

from .errors import AddressError

_ADDRESS = re.compile(r"((?:[0-9]+\.)+)@([^.]*)(?:\.(.*))?", re.DOTALL)
_DIGEST = re.compile(r"![0-9a-f]{40}")
#: Longer exchange words become digests, so that N levels always leave room for a key's digest:
#: 1 + 64 + 1 + 41 bytes at most, which is ``ladder.MIN_ROOM``.
_MAX_EXCHANGE_WORD = 65


@dataclass(frozen=True)
class Destination:
    """What the publisher asked for: an exchange (``""`` is the default one) and a routing key."""

    exchange: str
    routing_key: str


def format_address(
    digits: tuple[int, ...],
    destination: Destination,
    *,
    room: int,
    topic: bool = False,
) -> str:
    """Write digits and destination as one routing key.

    :param room: bytes that the longest digits of the ladder leave: ``255 - prefix_length``.
    :param topic: whether bindings may match the key with wildcards, so that it must stay readable.
    :raises AddressError: where a topic key does not fit.
    """
    return "".join(f"{digit}." for digit in digits) + route(destination, room=room, topic=topic)


def parse_address(
    key: str, carried: Destination | None = None
) -> tuple[tuple[int, ...], Destination]:
    """Read digits and destination back from a routing key: the inverse of :func:`format_address`.

    :param carried: the destination that travelled beside the address, needed where a digest stands
        in it, ignored elsewhere.
    :raises AddressError: where ``key`` is no address, or its digests are not those of ``carried``.
    """
    match = _ADDRESS.fullmatch(key)
    if match is None:
        raise AddressError(f"{key!r} is not an address of a ladder")
    prefix, word, words = match[1], match[2], match[3]
    digits = tuple(int(digit) for digit in prefix[:-1].split("."))
    if prefix != "".join(f"{digit}." for digit in digits):
        raise AddressError(f"{key!r} has digits with leading zeros")
    exchange = _read_exchange(word, carried)
    routing_key = _read_key(words, carried)
    destination = Destination(exchange, routing_key)
    if words == "" or exchange_word(exchange) != "@" + word:
        raise AddressError(f"{key!r} is not spelled as an address is")
    return digits, destination


def is_digest(key: str) -> bool:
    """Whether an address holds a digest, so that its destination must travel beside it."""
    return "!" in key and any(
        word.startswith(("!", "@!")) for word in key[key.index("@") :].split(".")
    )


def route(destination: Destination, *, room: int, topic: bool = False) -> str:
    """Write what follows the digits of an address: the exchange word and the key's words.

    :raises AddressError: where a topic key does not fit into ``room`` bytes.
    """
    exchange = exchange_word(destination.exchange)
    text = exchange + key_words(destination.routing_key)
    length = _length(text)
    if length <= room:
        return text
    if topic:
        limit = room - _length(exchange) - 1
        raise AddressError(
            f"the routing key {destination.routing_key!r} takes {length - _length(exchange) - 1} "
            f"bytes, a delayed message to the exchange {destination.exchange!r} has "
            f"{limit} left for it; use a shorter key, or declare the exchange on this connection "
            f"if it is not a topic exchange"
        )
    return f"{exchange}.{_digest(destination.routing_key)}"


def exchange_word(exchange: str) -> str:
    """Write an exchange's name as the one word that marks where the digits of an address end."""
    word = "@" + _escape(exchange).replace(".", "%2E")
    return word if _length(word) <= _MAX_EXCHANGE_WORD else "@" + _digest(exchange)


def key_words(routing_key: str) -> str:
    """Write the words of a literal routing key, each with a dot before it."""
    if not routing_key:
        return ""
    return "".join("." + _escape(word) for word in routing_key.split("."))


def pattern_words(binding_key: str) -> str:
    """Write the words of a topic binding key, wildcards kept, each with a dot before it."""
    if not binding_key:
        return ""
    words = binding_key.split(".")
    return "".join("." + (word if word in ("*", "#") else _escape(word)) for word in words)


def _escape(word: str) -> str:
    word = word.replace("%", "%25")
    if word in ("*", "#") or word.startswith("!"):
        return f"%{ord(word[0]):02X}{word[1:]}"
    return word


def _digest(name: str) -> str:
    return "!" + blake2b(name.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()


def _length(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


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
    if key_words(key) != "." + words and words:
        raise AddressError(f"{words!r} is not spelled as the routing key in an address is")
    return key


def _carried(digest: str, name: str | None) -> str:
    if name is None or _digest(name) != digest:
        raise AddressError(f"the name behind the digest {digest!r} does not travel beside it")
    return name
