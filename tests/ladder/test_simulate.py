"""The walk through the topology is the executable specification of the ladder."""

from hypothesis import given
from hypothesis import strategies as st

from kombu_binary_delay import AddressError, Ladder, LadderError, Topology
from kombu_binary_delay.ladder.address import (
    Destination,
    format_address,
    has_digest,
    key_words,
    parse_address,
    pattern_words,
)
from kombu_binary_delay.ladder.ladder import MAX_KEY, hops
from kombu_binary_delay.ladder.parts import Binding, Exchange, Part
from kombu_binary_delay.ladder.simulate import by_source, matches_topic, route_message, walk
from kombu_binary_delay.ladder.topology import LAYOUTS, QUEUE_TYPES


def build(tick, radices):
    try:
        return Ladder(tick, radices)
    except LadderError:
        return Ladder(1, (2,))


ladders = st.builds(
    build, st.integers(1, 5000), st.lists(st.integers(2, 12), min_size=1, max_size=40).map(tuple)
)
#: What AMQP allows: up to 255 bytes; the characters that mean something to us are drawn often.
names = st.text(st.one_of(st.sampled_from(".*#%@!10a"), st.characters(exclude_categories=["Cs"])))
names = names.filter(lambda name: len(name.encode()) <= MAX_KEY)
keys = names
destinations = st.builds(Destination, names, keys)
kinds = st.sampled_from(["direct", "topic", "fanout"])


@st.composite
def delays(draw, ladder):
    return draw(st.integers(1, ladder.maximum))


@given(st.data(), ladders)
def test_digits_are_read_back_as_the_delay_rounded_up_to_ticks(data, ladder):
    delay = data.draw(delays(ladder))

    read = ladder.delay(ladder.digits(delay))

    assert delay <= read < delay + ladder.tick
    assert ladder.digits(read) == ladder.digits(delay)


@given(ladders)
def test_a_ladder_is_read_back_from_its_name(ladder):
    assert Ladder.from_name(ladder.name) == ladder


@given(st.data(), ladders, destinations)
def test_an_address_is_read_back_and_fits(data, ladder, destination):
    topology = Topology(ladder)
    digits = ladder.digits(data.draw(delays(ladder)))

    address = format_address(digits, destination)

    assert len(address.encode()) <= MAX_KEY
    assert parse_address(address, destination) == (digits, destination)
    if not has_digest(address):
        assert parse_address(address) == (digits, destination)
    # On a ladder's exchange, an address is formatted again from its own destination.
    assert topology.unwrap(Destination(topology.delivery, address), destination) == destination


@given(st.data(), ladders)
def test_the_bits_of_a_delay_are_its_number_of_ticks(data, ladder):
    delay = data.draw(delays(ladder))
    words = ladder.digits(delay)
    radices = ladder.radices[ladder.levels - len(words) :]

    ticks = 0
    for word, radix in zip(words, radices, strict=True):
        assert len(word) == len(f"{radix - 1:b}")
        ticks = ticks * radix + int(word, 2)

    assert ticks == -(-delay // ladder.tick)
    if all(radix.bit_count() == 1 for radix in ladder.radices):
        assert int("".join(words), 2) == ticks


@given(ladders, st.lists(st.text("012", min_size=1, max_size=4), max_size=5), st.data())
def test_a_ladder_reads_its_own_addresses_and_refuses_all_others(ladder, words, data):
    topology, prefix = Topology(ladder), "".join(f"{word}." for word in words)
    address = topology.address(ladder.digits(data.draw(delays(ladder))), Destination("", "q"))
    for key in (address, f"{prefix}@..q"):
        assert topology.destination(address) == Destination("", "q")
        try:
            digits, destination = topology.parse(key)
        except AddressError:
            assert key != address
            continue
        assert ladder.digits(ladder.delay(digits)) == digits
        assert topology.address(digits, destination) == key


@given(names)
def test_every_key_that_parses_is_the_one_that_its_parts_format_to(text):
    key = f"0.1.@.{text}"
    try:
        digits, destination = parse_address(key)
    except ValueError:
        return
    assert format_address(digits, destination) == key


@given(names, names)
def test_escaping_changes_nothing_in_what_a_topic_pattern_matches(pattern, key):
    escaped = matches_topic("x" + pattern_words(pattern), "x" + key_words(key))

    assert escaped == matches_topic(pattern, key)


@given(st.data(), ladders, st.sampled_from(QUEUE_TYPES), st.sampled_from(LAYOUTS))
def test_a_message_waits_its_delay_in_one_queue_at_a_time_and_reaches_its_queue_alone(
    data, ladder, queue_type, layout
):
    topology = Topology(ladder, queue_type=queue_type, layout=layout)
    wanted, other = data.draw(st.lists(names, min_size=2, max_size=2, unique=True))
    digits = ladder.digits(data.draw(delays(ladder)))
    part = topology.whole + topology.to_queue(wanted) + topology.to_queue(other)

    address = format_address(digits, Destination("", wanted))

    path = walk(part, topology.entry_exchange(digits), address)

    # Its level leads it the same way, but reads the first digit itself.
    assert path == walk(part, topology.level_of(digits), address)
    # The walk itself refuses a message that is in more than one queue.
    assert path.total == ladder.delay(digits)
    assert len(path.waits) == hops(digits)
    assert path.arrived == {wanted}


@given(st.data(), ladders, st.sampled_from(LAYOUTS), st.booleans())
def test_what_a_message_passes_is_all_that_it_needs_of_a_ladder(data, ladder, layout, direct):
    """Without the bindings into delivery, of its own level, and into it, but for those named."""
    topology = Topology(ladder, layout=layout)
    digits = ladder.digits(data.draw(delays(ladder)))
    whole = topology.whole + topology.direct_base + topology.to_queue("q")
    whole += Part(bindings=sum(map(topology.direct_bindings, range(ladder.levels)), ()))
    first = topology.direct if direct else topology.entry_exchange(digits)
    address = format_address(digits, Destination("", "q"))

    exchanges, queues, bindings = topology.passed(digits, direct=direct)

    kept = {*exchanges, *queues, "q"}
    kept |= {part_of_base.name for part_of_base in topology.base.exchanges + topology.base.queues}
    unproven = {topology.level_of(digits), topology.direct_fallback}
    proven = tuple(
        binding
        for binding in whole.bindings
        if {binding.source, binding.destination} <= kept
        and binding.destination != topology.delivery
        and binding.source not in unproven
    )
    assert {*bindings} <= {*whole.bindings}
    needed = Part(
        tuple(exchange for exchange in whole.exchanges if exchange.name in kept),
        tuple(queue for queue in whole.queues if queue.name in kept),
        proven + bindings,
    )
    assert walk(needed, first, address) == walk(whole, first, address)


@given(st.data(), kinds, kinds)
def test_a_delayed_message_reaches_the_queues_that_an_undelayed_one_would(data, kind, other_kind):
    """Two exchanges with bindings of all sorts, one perhaps bound to the other."""
    topology = Topology(Ladder.binary(5, 1000))
    words = st.lists(st.sampled_from(["a", "1", "*", "#", "", "@", "x"]), max_size=4).map(".".join)
    bound = st.lists(st.tuples(st.sampled_from(["q1", "q2", "q3"]), words), max_size=4)
    exchanges = {"x": kind, "y": other_kind}
    bindings = {name: data.draw(bound) for name in exchanges}
    onward = data.draw(st.lists(words, max_size=2))
    key = data.draw(words)

    plain, mirrors = [], Part()
    for name, taken in bindings.items():
        mirrors += topology.mirror(name)
        for queue, pattern in taken:
            plain.append((name, queue, pattern, True))
    plain += [("x", "y", pattern, False) for pattern in onward]
    mirrored = Part(
        bindings=tuple(
            binding
            for source, target, pattern, to_queue in plain
            for binding in topology.mirror_bindings(
                source, exchanges[source], target, pattern, to_queue=to_queue
            )
        )
    )
    undelayed = _route(exchanges, plain, "x", key)

    digits = topology.ladder.digits(data.draw(st.integers(1, 31)) * 1000)
    path = walk(
        topology.whole + mirrors + mirrored,
        topology.entry_exchange(digits),
        format_address(digits, Destination("x", key), topic=kind == "topic"),
    )

    # What an undelayed message would not reach is parked, and never lost.
    assert path.arrived - {topology.parking} == undelayed
    assert undelayed or path.arrived == {topology.parking}


def _route(exchanges, bindings, exchange, key):
    """Route as RabbitMQ does, by the walk's own routing on plain exchanges."""
    table = {name: Exchange(name, kind) for name, kind in exchanges.items()}
    return route_message(table, by_source(Binding(*b) for b in bindings), exchange, [key])
