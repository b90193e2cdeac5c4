"""The form of the ladder before today's: as it exists where it was made, letter by letter."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kombu_binary_delay import AddressError, LadderError, Topology
from kombu_binary_delay.model.address import Destination
from kombu_binary_delay.model.parts import Binding
from kombu_binary_delay.model.recognise import topology_of_name
from kombu_binary_delay.model.simulate import walk
from kombu_binary_delay.model.v1 import LadderV1, TopologyV1

SMALL = TopologyV1(LadderV1(1000, (2, 4)))
DEFAULT = TopologyV1()


def test_its_names_and_binding_keys_are_those_of_v1():
    level = SMALL.levels[0]
    name = "kbd.v1-1000ms-2x1-4x1.level-00"

    assert DEFAULT.prefix == "kbd.v1-125ms-2x1-4x15"
    assert [each.name for each in level.queues] == [f"{name}.1", f"{name}.2", f"{name}.3"]
    assert [each.name for each in level.exchanges] == [f"{name}.1", f"{name}.2", f"{name}.3", name]
    assert [each.key for each in level.bindings if each.source == name] == [
        *("1.#", "2.#", "3.#", "0.#")
    ]
    assert (SMALL.delivery, SMALL.parking) == ("kbd.v1.delivery", "kbd.v1.parking")
    assert SMALL.mirror_name("x") == "kbd.v1.to.x"
    assert SMALL.exchange_relay_name("x") == "kbd.v1.outlet.x"
    assert SMALL.queue_relay_name("x") == "kbd.v1.into.x"
    assert SMALL.direct_queue(("1", "2")) == SMALL.direct_queue(SMALL.ladder.digits(6000))
    assert [each.name for each in SMALL.direct_queue(("1", "2")).queues] == [
        "kbd.v1-1000ms-2x1-4x1.own.6000ms"
    ]
    assert SMALL.direct_bindings(0)[0] == Binding(
        "kbd.v1-1000ms-2x1-4x1.enter", name, "1.@.#", to_queue=False
    )


@pytest.mark.parametrize(
    ("key", "digits"),
    [
        ("0.0.1.1.@..mail", ("1", "1", "0", "0")),
        ("3.@!..mail", ("3",)),
        ("0.0.2.@.events.order.paid", ("2", "0", "0")),
    ],
)
def test_its_keys_are_read_and_written(key, digits):
    found, destination = DEFAULT.parse(key)

    assert found == digits
    assert destination == Topology().destination(key)
    assert DEFAULT.address(digits, destination) == key.replace("@!", "@")


@pytest.mark.parametrize("key", ["4.@..q", "01.@..q", "1.0.@..q", "00.01.@..q", "1." * 17 + "@..q"])
def test_what_it_never_wrote_is_not_read(key):
    with pytest.raises(AddressError):
        DEFAULT.parse(key)
    with pytest.raises(LadderError):
        DEFAULT.ladder.delay(("٣",))


@given(st.sampled_from([SMALL, TopologyV1(layout="skip"), TopologyV1(lane=2)]), st.data())
def test_a_message_waits_its_delay_and_is_read_back(topology, data):
    ladder = topology.ladder
    delay = data.draw(st.integers(1, ladder.maximum))
    digits = ladder.digits(delay)
    key = topology.address(digits, Destination("", "q"))

    way = walk(topology.whole + topology.to_queue("q"), topology.entry_exchange(digits), key)

    assert way.arrived == {"q"}
    assert way.total == ladder.delay(digits)
    assert topology.parse(key) == (digits, Destination("", "q"))


@pytest.mark.parametrize(
    "topology",
    [DEFAULT, TopologyV1(LadderV1.binary(4), "a", "classic", "skip"), TopologyV1(urgent=True)],
)
def test_it_is_told_from_todays_form_by_its_names(topology):
    today = Topology(namespace=topology.namespace)
    for each in topology.levels[0].queues:
        assert topology_of_name(each.name) == topology
        assert today.owns(each.name)
    assert topology.owns(today.level_name(0))
    assert topology.delivery != today.delivery
