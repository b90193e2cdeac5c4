"""The end of a stream, as a real broker answers; and streams that programs declare at once."""

from __future__ import annotations

import threading
import time
from typing import Any

import amqp
import pytest
from amqp.exceptions import NotFound

from kombu_binary_delay.wire import deliveries, streams
from kombu_binary_delay.wire.streams import PREFETCH, StreamError, last_offset, pages
from tests.waits import wait_until

NAME = "log"


@pytest.fixture
def reader(connect):
    connection = connect("amqp")
    connection.connect()
    return connection.connection


@pytest.fixture(params=["in bulk", "singly"])
def _way(request, monkeypatch):
    if request.param == "singly":
        monkeypatch.setattr(deliveries, "is_possible", lambda _: False)


def make(connection):
    arguments = {"x-queue-type": "stream"}
    connection.default_channel.queue_declare(
        NAME, durable=True, auto_delete=False, arguments=arguments
    )


def write(connection, first, count):
    channel = connection.channel()
    channel.confirm_select()
    for number in range(first, first + count - 1):
        amqp.Channel._basic_publish(channel, amqp.Message(f"{number}"), "", NAME)  # noqa: SLF001
    channel.basic_publish_confirm(amqp.Message(f"{first + count - 1}"), "", NAME)
    channel.close()


def numbers(page):
    return [int(delivery.body) for delivery in page]


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("count", [1, PREFETCH, 3 * PREFETCH + 1])
def test_all_that_was_confirmed_before_is_read_and_in_order(connect, reader, count):
    publisher = connect("amqp")
    make(publisher)
    write(publisher, 0, count)
    read = [number for page in pages(reader, NAME) for number in numbers(page)]
    assert read == list(range(count))
    last = last_offset(reader, NAME)
    assert last is not None
    [*_, final] = [page[-1] for page in pages(reader, NAME, last)]
    assert (final.offset, int(final.body)) == (last, count - 1)


def test_each_confirmed_record_is_the_last_for_who_looks_next(connect, reader):
    publisher = connect("amqp")
    make(publisher)
    for number in range(50):
        write(publisher, number, 1)
        [*_, final] = [page[-1] for page in pages(reader, NAME, "last")]
        assert int(final.body) == number


def test_an_end_is_found_while_a_program_goes_on_to_write_and_the_reader_stands_still(
    connect, reader
):
    publisher, over = connect("amqp"), threading.Event()
    make(publisher)
    write(publisher, 0, 100)

    def write_on():
        for number in range(100, 10**9):
            if over.is_set():
                return
            write(publisher, number, 1)

    writing = threading.Thread(target=write_on)
    writing.start()
    try:
        read: list[int] = []
        for page in pages(reader, NAME):
            read += numbers(page)
            time.sleep(0.5)
        assert read == list(range(len(read)))
        assert len(read) >= 100
    finally:
        over.set()
        writing.join()


def test_a_stream_without_a_record_is_read_after_a_moment(connect, reader, monkeypatch):
    make(connect("amqp"))
    monkeypatch.setattr(streams, "QUIET", 0.1)
    assert list(pages(reader, NAME)) == []
    assert last_offset(reader, NAME) is None


def test_a_first_record_may_take_its_time(connect, reader, monkeypatch):
    """Given: a broker that has counted the records, and takes longer to send the first."""
    publisher = connect("amqp")
    make(publisher)
    write(publisher, 0, 3)
    wait_until(lambda: streams.count(reader, NAME))
    monkeypatch.setattr(streams, "QUIET", 0.0)
    assert [numbers(page) for page in pages(reader, NAME)] == [[0, 1, 2]]


def test_a_record_that_another_node_has_is_waited_for(connect, reader):
    publisher = connect("amqp")
    make(publisher)
    write(publisher, 0, 3)
    last = last_offset(reader, NAME)
    assert last is not None
    read = pages(reader, NAME, "first", until=last + 1)
    assert numbers(next(read)) == [0, 1, 2]
    write(publisher, 3, 1)
    assert [numbers(page) for page in read] == [[3]]


def test_a_stream_that_is_deleted_meanwhile_or_missing_is_an_error(connect, reader):
    with pytest.raises(NotFound, match="no queue 'log'"):
        next(pages(reader, NAME))
    publisher = connect("amqp")
    make(publisher)
    write(publisher, 0, 2)
    read = pages(reader, NAME, until=100)
    next(read)
    publisher.default_channel.queue_delete(NAME)
    with pytest.raises(StreamError, match="ended the reading"):
        next(read)


def test_a_broker_that_does_not_answer_is_an_error(connect, reader, monkeypatch):
    publisher = connect("amqp")
    make(publisher)
    write(publisher, 0, 1)
    read: list[Any] = []
    channel = streams.StreamChannel(reader, read.append)
    channel.read({NAME: 1})
    # The answer to another question is none to this one.
    monkeypatch.setattr(streams, "PATIENCE", 1.0)
    channel.send_method = lambda *_, **__: None
    with pytest.raises(StreamError, match="did not answer within 1 s"):
        channel.read_to_end()
