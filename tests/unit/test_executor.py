"""How commands are run one after the other; what they do on a broker is tested there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from amqp.exceptions import AccessRefused, NotFound, PreconditionFailed

from kombu_binary_delay import TopologyError
from kombu_binary_delay.ladder.parts import Binding, Part
from kombu_binary_delay.routing.commands import Answer, Ensure, Look, OutOfReachError, Warn
from kombu_binary_delay.wire.executor import Executor


def test_an_error_of_a_callback_is_not_taken_for_the_end_of_the_commands(monkeypatch):
    """Frames that waited are dispatched after a command: a callback may raise anything."""

    def callback(*_):
        raise StopIteration

    monkeypatch.setattr("kombu_binary_delay.wire.executor.logger.warning", callback)

    def steps():
        yield Warn("first")

    with pytest.raises(StopIteration):
        Executor(object(), "kbd").run(steps())


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("no queue 'q' in vhost '/'", Answer.MISSING),
        ("no exchange 'x' in vhost '/'", Answer.MISSING),
        ("home node 'a@b' of durable queue 'no queue' in vhost '/' is down or inaccessible", None),
        ("failed to perform operation on queue 'q' in vhost '/' due to timeout", None),
    ],
)
def test_a_queue_whose_node_is_down_is_not_missing(monkeypatch, text, answer):
    """These are RabbitMQ's texts, of 3.10 and of 4.3; only a cluster has all of them."""

    def refuse(*_):
        raise NotFound(f"NOT_FOUND - {text}")

    monkeypatch.setattr("kombu_binary_delay.wire.executor.declare", refuse)
    monkeypatch.setattr("kombu_binary_delay.wire.executor.wait", refuse)
    executor = Executor(object(), "kbd")
    connection = SimpleNamespace(frame_writer=None)
    monkeypatch.setattr(executor, "_open", lambda: SimpleNamespace(connection=connection))
    for command in (Ensure(Part(), "the levels up to 2"), Look()):
        if answer:
            assert executor.do(command) is answer
            continue
        with pytest.raises(OutOfReachError, match="cannot reach the l") as raised:
            executor.do(command)
        assert text in str(raised.value)


def test_a_way_exists_while_the_other_one_is_removed_and_after(monkeypatch):
    """Two programs that remove each other's at once leave one in any case."""
    ours, others, behind = Binding("x", "q", "a"), Binding("x", "r", "a"), Binding("y", "q", "b")
    done = []
    monkeypatch.setattr(
        "kombu_binary_delay.wire.executor._bind", lambda _, binding: done.append(binding)
    )
    monkeypatch.setattr(
        "kombu_binary_delay.wire.executor._unbind", lambda _, binding: done.append(("not", binding))
    )
    monkeypatch.setattr("kombu_binary_delay.wire.executor.wait", lambda _: None)
    executor = Executor(object(), "kbd")
    connection = SimpleNamespace(frame_writer=None)
    monkeypatch.setattr(executor, "_open", lambda: SimpleNamespace(connection=connection))

    assert executor.do(Look(bindings=(ours, behind), others=(others,))) is Answer.DONE

    assert done == [ours, behind, ("not", others), ours]


@pytest.mark.parametrize(
    ("refused", "names", "remedy"),
    [
        ("queue 'shop.v2.journal'", "'shop.'", "set another namespace"),
        ("exchange 'nsb.v2.delay-level-01'", "'nsb.v2.delay-'", "use another ladder"),
        ("exchange 'celery_delayed_1'", "'celery_delayed_'", "use another ladder"),
    ],
)
def test_a_refusal_names_the_names_and_the_remedy_of_its_ladder(refused, names, remedy):
    def said(error):
        explained = Executor(object(), "shop")._explained("a level", "")  # noqa: SLF001
        with pytest.raises(TopologyError) as raised, explained:
            raise error
        return str(raised.value)

    assert f"begin with {names}" in said(AccessRefused(f"ACCESS_REFUSED - access to {refused}"))
    assert remedy in said(PreconditionFailed(f"inequivalent arg 'x-max-age' for {refused}"))
