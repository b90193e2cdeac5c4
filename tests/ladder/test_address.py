"""Digits and destination in one routing key."""

import pytest

from kombu_binary_delay import AddressError
from kombu_binary_delay.ladder.address import (
    Destination,
    exchange_word,
    format_address,
    has_digest,
    parse_address,
)


@pytest.mark.parametrize(
    ("exchange", "routing_key", "address"),
    [
        ("", "celery", "00.00.01.@..celery"),
        ("orders", "eu.new", "00.00.01.@.orders.eu.new"),
        ("orders", "", "00.00.01.@.orders"),
        ("", "", "00.00.01.@."),
        ("a.b", "k", "00.00.01.@.a%2Eb.k"),
        ("x", "*.a.#", "00.00.01.@.x.%2A.a.%23"),
        ("x", "a*.#b", "00.00.01.@.x.a*.#b"),
        ("x", "100%", "00.00.01.@.x.100%25"),
        ("x", ".", "00.00.01.@.x.."),
        ("!x", "!y", "00.00.01.@.%21x.%21y"),
        ("@", "@.@1.1", "00.00.01.@.%40.%40.@1.1"),
        ("größe", "ключ", "00.00.01.@.größe.ключ"),
    ],
)
def test_an_address_reads_and_is_read_back(exchange, routing_key, address):
    destination = Destination(exchange, routing_key)

    assert format_address(("01", "00", "00"), destination) == address
    assert parse_address(address) == (("01", "00", "00"), destination)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "celery",
        "0.1.celery",
        "0.1.@",
        "0.1.@celery",
        "1.0.@..celery",
        "0.2.@..celery",
        "00.00.@..celery",
        "0.1.@.x.",
        "0.1.@.x.*",
        "0.1.@.x.@",
        "0.1.@.@",
        "0.1.@.x.%zz",
        "0.1.@.x.%41",
        "0.1.@.%41",
        "0.1.@.x.!" + "0" * 40,
        "0.1.@.!" + "0" * 40,
        "-1.@.x",
        "٣.@.x",
    ],
)
def test_what_no_ladder_wrote_is_no_address(key):
    with pytest.raises(AddressError):
        parse_address(key)


def test_a_long_destination_becomes_a_digest_and_is_read_back_with_what_travels_beside_it():
    destination = Destination("e" * 255, "q" * 255)

    address = format_address(("01",) * 26, destination)

    assert len(address) <= 255
    assert has_digest(address)
    assert parse_address(address, destination) == (("01",) * 26, destination)
    with pytest.raises(AddressError, match="no header with the name behind the digest"):
        parse_address(address, Destination("e" * 255, "other"))


def test_a_topic_key_that_does_not_fit_is_refused_with_the_length_that_would():
    with pytest.raises(AddressError, match=r"takes 255 bytes.* 172"):
        format_address(("01",) * 26, Destination("xy", "k" * 255), topic=True)


def test_the_word_of_an_exchange_is_one_word_of_bounded_length():
    for exchange in ("", "a.b.c", "#", "*", "é" * 127, "." * 255):
        word = exchange_word(exchange)
        assert "." not in word
        assert len(word.encode()) <= 64
