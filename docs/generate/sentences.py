"""Purpose: the figures of measurements in the sentences of README, pages and code.

Each sentence below is in its page, word for word except for the figures, which are replaced with
those of the recorded results. To change a sentence, change it in both places.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any, NamedTuple

from benchmarks.travel import SIZE
from benchmarks.waiting import BODY
from kombu_binary_delay import Ladder

from . import badges, conformance, faults
from .benchmarks import LADDERS, figure, queues, to_default, waits

#: A number, a word such as "seven", or a share such as "a tenth".
_FIGURE = r"(?:\d[\d.,]*\d|\d|(?:[Aa]\s+)?[A-Za-z]+)(?:\s%)?"
_WORDS = (
    *("no", "one", "two", "three", "four", "five", "six"),
    *("seven", "eight", "nine", "ten", "eleven", "twelve"),
)

README = "README.md"
INDEX = "docs/index.md"
PERFORMANCE = "docs/explanation/performance.md"
ON_4 = "docs/explanation/performance-on-rabbitmq-4.md"
GLANCE = "docs/explanation/at-a-glance.md"
#: What the report of a plan reckons with.
MEASURED = "kombu_binary_delay/spark/report/measured.py"


_YEAR = 365 * 86_400  # s
#: The scenarios in which something is killed, stopped, frozen or cut; the ladder is whole.
_KILLED = (
    *("broker killed", "publisher ends", "consumer ends", "Celery worker ends"),
    *("cluster of three", "connection cut"),
)
_LEDGER = ("lost", "early", "confirmed")
#: The results by which the default ladder was chosen.
_LADDERS_COMPARED = tuple(
    f"{each}{release}" for each in ("burst", "hour", "day") for release in ("", "-on-4.3")
)
#: The steady rate and the herd on the machine that the further waits are of.
_SLOWER, _SLOWER_HERD = "slower-machine/sustained", "slower-machine/herd"
#: One publish of ours beside one of a peer, on two releases.
_PAIRS = ("pairs", "pairs-on-4.3")


class Sentence(NamedTuple):
    """A part of a page with ``{}`` in place of each figure."""

    page: str
    text: str
    figures: tuple[str, ...]


def sentences() -> list[Sentence]:
    """Return all sentences with the figures of the recorded results."""
    tried = [
        badges.between(conformance.tried(each)).split(" to ") for each in ("rabbitmq", "celery")
    ]
    return [
        *(each for page in (README, INDEX) for each in _two_numbers(page)),
        Sentence(README, "one per distinct delay | up to {} |", (str(queues(Ladder.default())),)),
        Sentence(INDEX, "RabbitMQ {} to {}, Celery {} to {}", (*tried[0], *tried[1])),
        *_performance(),
        *_herd(),
        *_ten_million(),
        *_measured(),
        *_delivery(),
        *_on_paper(),
        *_publishing(),
        *_spark(),
        *_tick(),
        *_prefetch(),
        *_faults(),
        *_wal(),
        *_amendments(),
        *_glance(),
    ]


def _burst(result: str) -> list[str]:
    """Return the share of native's CPU, our p99 lateness in ms, and native's in s."""
    ours, native = (figure(result, row, "p99") for row in ("ours", "celery-native"))
    share = _share(figure(result, "ours", "cpu_us", "ratio"))
    return [share, f"{ours:.0f}", f"{native / 1000:.0f}"]


def _two_numbers(page: str) -> list[Sentence]:
    """Return the sentences on the cost of a burst, and on losses after a kill."""
    old, new = _burst("burst"), _burst("burst-on-4.3")
    runs = [row for row in faults.runs() if row["scenario"] in _KILLED]
    lost, early, confirmed = (sum(row[each] for row in runs) for each in _LEDGER)
    return [
        Sentence(
            page,
            "**{}** of the broker's CPU that Celery's native ladder (a chain of queues) takes for "
            "a burst of 20,000 delayed messages on RabbitMQ 3.10, and a p99 lateness of {} ms "
            "instead of {} s; {}, and {} ms instead of {} s on 4.3",
            (old[0].capitalize(), *old[1:], *new),
        ),
        Sentence(
            page,
            "**{} lost and {} early** of {} confirmed messages, while brokers, nodes, publishers, "
            "consumers and workers were killed",
            (str(lost), str(early), f"{confirmed:,}"),
        ),
    ]


def steady(result: str = "sustained", way: str = "ours") -> float:
    """Return what two cores carry of messages that wait once, by the CPU of all who share them."""
    used = ("cpu_us", "publisher_us", "consumer_us")
    return 2e6 / sum(figure(result, way, each) for each in used)


def beside_native(result: str) -> float:
    """Return how many times the native ladder's rate ours is, by the rates that are shown."""
    return _rate(result, "ours") / _rate(result, "celery-native")


def _rate(result: str, way: str) -> float:
    """Return how many messages a second were published at the highest rate that was held."""
    return figure(result, way, "publish_rate")


def _said(text: str, figures: list[str]) -> Sentence:
    return Sentence(PERFORMANCE, text, tuple(figures))


def _performance() -> list[Sentence]:
    def of(name: str, key: str = "cpu_us") -> float:
        return figure("hops", name, key)

    here, second = (figure(f"{run}burst", "floor", "cpu_us") for run in ("", "second-run/"))
    rates = {
        name: _rate("sustained-on-4.3", name) for name in ("ours", "nservicebus", "celery-native")
    }
    hop, bare = ((of(f"{each}-6") - of(f"{each}-1")) / 5 for each in ("ours", "bare"))
    costs = {
        name: [to_default(each, name, "cpu_us") for each in _LADDERS_COMPARED]
        for name in ("three-bits", "two-bits", "binary")
    }
    return [
        _said(
            "The native ladder takes {} times the broker's CPU of a message without delay",
            [_word(figure("easy", "celery-native", "cpu_us", "ratio"))],
        ),
        _said(
            "99 of 100 messages come within {} ms by it, and within {} ms by ours",
            [f"{figure('easy', each, 'p99'):.0f}" for each in ("celery-native", "ours")],
        ),
        _said(
            "Three bits on every level cost {} to {} times the broker's CPU of the default, two "
            "bits {} to {} times, and one bit {} to {} times",
            [f"{find(each):.2f}" for each in costs.values() for find in (min, max)],
        ),
        _said(
            "It has the fewest queues: {} for an hour, where the default has {}",
            [_queues_of_an_hour(LADDERS[each][1]) for each in ("binary", "ours")],
        ),
        _said(
            "Delays of months wait more often instead: up to a year {} times, and {} times with "
            "three bits a level",
            [f"{waits(LADDERS[each][1], _YEAR, 7919):.1f}" for each in ("ours", "three-bits")],
        ),
        _said(
            "The burst of that run is of a machine that takes {} of the CPU for a message without "
            "a delay",
            [_share(second / here)],
        ),
        Sentence(
            ON_4,
            "native delivery takes {} µs of the broker's CPU here, and {} on 3.10 on the same "
            "machine, and ours {} and {}. So ours takes {} of native's CPU, and {} on 3.10",
            (
                *(
                    f"{figure(run, way, 'cpu_us'):,.0f}"
                    for way in ("celery-native", "ours")
                    for run in ("day-on-4.3", "day")
                ),
                *(f"{figure(run, 'ours', 'cpu_us', 'ratio'):.2f}" for run in ("day-on-4.3", "day")),
            ),
        ),
        Sentence(
            ON_4,
            "two cores carry {} of ours, {} by NServiceBus's ladder and {} by native delivery",
            tuple(
                f"{steady('sustained-on-4.3', way):,.0f}"
                for way in ("ours", "nservicebus", "celery-native")
            ),
        ),
        Sentence(
            ON_4,
            "Ours carries {} a second, {} times as many as NServiceBus's ladder and {} times as "
            "many as native delivery",
            (
                f"{rates['ours']:,.0f}",
                f"{rates['ours'] / rates['nservicebus']:.1f}",
                f"{rates['ours'] / rates['celery-native']:.1f}",
            ),
        ),
        Sentence(
            ON_4,
            "it held {}, and took nothing more",
            (f"{figure('worker-on-4.3', 'celery', 'held'):,.0f}",),
        ),
        _said(
            "cores carry {} a second of ours, by the CPU that broker, publisher and consumer take "
            "for a message, {} by NServiceBus's ladder and {} by the native one",
            [f"{steady(way=way):,.0f}" for way in ("ours", "nservicebus", "celery-native")],
        ),
        _said(
            "A slower machine carried {} a second of ours, and {} by the native ladder, in [three "
            "rounds](#how-to-repeat-it): {} times as many, and {} times here.",
            [
                *(f"{_rate(_SLOWER, way):,.0f}" for way in ("ours", "celery-native")),
                _word(beside_native(_SLOWER)),
                _word(beside_native("sustained")),
            ],
        ),
        _said("four bits on every level have {}", [str(queues(Ladder.uniform(16)))]),
        _said(
            "A message with one wait costs the broker {} times what one without a delay does, one "
            "with two waits {} times. A further wait costs {} times a bare dead-letter: {} µs, "
            "beside {}.",
            [
                f"{of('ours-1') / of('floor'):.1f}",
                f"{of('ours-2') / of('floor'):.1f}",
                f"{hop / bare:.2f}",
                f"{hop:.0f}",
                f"{bare:.0f}",
            ],
        ),
        _said(
            "it had taken {}, each for {} KB",
            [
                f"{figure('worker', 'celery', 'held'):,.0f}",
                f"{figure('worker', 'celery', 'per_task') / 1000:.0f}",
            ],
        ),
    ]


def _herd() -> list[Sentence]:
    def of(run: str, way: str, name: str) -> str:
        return f"{figure(run, way, name):,.0f}"

    def to_bare(run: str) -> str:
        return f"{figure(run, 'ours', 'rate', 'ratio'):.2f}"

    split = "herd-parts-on-4.3"
    before = {
        way: figure("herd-on-4.3", way, "cpu_us") - figure("herd-on-4.3", way, "release_cpu_us")
        for way in ("ours", "celery-native")
    }
    cpu = [of(split, way, "consumer_us") for way in ("headers-read", "ours", "transport-reads")]
    rates = [of(split, way, "rate") for way in ("headers-read", "transport-reads")]
    rest = [of(split, way, "release_cpu_us") for way in ("with-headers", "ours")]
    last = {
        run: [f"{figure(run, way, 'last_ms') / 1000:.0f}" for way in ("ours", "celery-native")]
        for run in ("herd-100000-on-4.3", "herd-100000")
    }
    return [
        _said(
            "Ours releases {} a second, {} of bare dead-lettering. What comes before, while "
            "messages wait and walk, takes {} of the native ladder's CPU",
            [
                of("herd-on-4.3", "ours", "rate"),
                to_bare("herd-on-4.3"),
                _share(before["ours"] / before["celery-native"]),
            ],
        ),
        _said(
            "To read them as well takes py-amqp {} µs a message in place of {}. RabbitMQ records "
            "each wait in them; this transport leaves out the records of its own waits, which "
            "takes {} µs. One consumer in Python took {} a second, and {} on this transport",
            [*cpu, *rates],
        ),
        _said("What is left, from {} to {} µs of the broker's CPU", rest),
        _said(
            "On RabbitMQ 3.10, the release costs {} times the CPU of bare dead-lettering with the "
            "exchange, the address and the headers, and {} times with the earlier waits, where 4.3 "
            "takes {} and {} times. So ours releases {} of bare dead-lettering there",
            [
                *(
                    f"{figure(run, way, 'release_cpu_us', 'ratio'):.1f}"
                    for run in ("herd-parts", split)
                    for way in ("with-headers", "ours")
                ),
                to_bare("herd"),
            ],
        ),
        _said(
            "Of so many, ours releases {} of bare dead-lettering: the last of 100,000 comes after "
            "{} s, and after {} s by the native ladder",
            [to_bare("herd-100000-on-4.3"), *last["herd-100000-on-4.3"]],
        ),
        _said(
            "the last of 100,000 comes after {} s, by ours after {} s", last["herd-100000"][::-1]
        ),
    ]


def _ten_million() -> list[Sentence]:
    def of(name: str, count: str = "10000000") -> float:
        return figure("waiting-on-4.3", count, name)

    def old(name: str, count: str = "10000000") -> float:
        return figure("waiting", count, name)

    return [
        _said(
            "Ten million take {} GB of memory, {} GB while they are published, and {} GB of disk",
            [f"{of(each) / 1e9:.1f}" for each in ("memory", "memory_at_most", "disk")],
        ),
        _said("all of that is {} bytes a message", [f"{of('memory_per_message'):.0f}"]),
        _said(
            "with ten million waiting, the node took {} s to restart instead of {}, and {} s until "
            "it took messages again",
            [
                f"{of('restart_seconds'):.0f}",
                f"{of('restart_seconds', '1000000'):.0f}",
                f"{of('usable_seconds'):.0f}",
            ],
        ),
        _said(
            "The node was back, with a copy of everything, in {} s",
            [f"{figure('cluster', 'the node back', 'restart_seconds'):.0f}"],
        ),
        _said(
            "found the cluster usable, {} s after the kill",
            [f"{figure('cluster', 'a node lost', 'usable_seconds'):.1f}"],
        ),
        _said(
            "So plan {} KB a message, and its body",
            [f"{(of('disk_per_message') - len(BODY)) / 1000:.1f}"],
        ),
        _said(
            "RabbitMQ 3.10 takes {} GB of memory and {} GB of disk for ten million",
            [f"{old(each) / 1e9:.1f}" for each in ("memory", "disk")],
        ),
        _said(
            "The node took {} s to restart instead of {}, and {} s until it took messages again",
            [
                f"{old('restart_seconds'):.0f}",
                f"{old('restart_seconds', '1000000'):.0f}",
                f"{old('usable_seconds'):.0f}",
            ],
        ),
        _said(
            "With ten million waiting, it released {} messages a second then, {} a minute later, "
            "and {} before the restart",
            [
                f"{old(f'release_rate{when}'):,.0f}"
                for when in ("_after_restart", "_a_minute_later", "")
            ],
        ),
    ]


def _measured() -> list[Sentence]:
    one, six = (figure("hops", f"ours-{each}", "cpu_us") for each in (1, 6))
    queue, slower = (figure(each, "bare", "rate") for each in ("herd", _SLOWER_HERD))
    disk = figure("waiting-on-4.3", "10000000", "disk_per_message") - len(BODY)
    return [
        Sentence(MEASURED, "FURTHER_WAIT = {}e-6, {}e-6", (f"{one:.0f}", f"{(six - one) / 5:.0f}")),
        Sentence(MEASURED, "SUSTAINED = {}", (f"{steady(_SLOWER):.1f}",)),
        Sentence(MEASURED, "ONE_QUEUE = {}", (f"{slower:.1f}",)),
        Sentence(MEASURED, "DISK_MORE = {}", (f"{disk:.1f}",)),
        _said("one process a queue, [some {} a second]", [f"{round(queue, -2):,.0f}"]),
    ]


def _delivery() -> list[Sentence]:
    def in_a_worker(run: str) -> list[str]:
        return [
            f"{figure(run, f'celery-{way}-prefork', 'cpu_us', 'ratio'):.1f}"
            for way in ("ours-delayed", "native")
        ]

    def of(way: str) -> float:
        return figure("delivery", way, "instructions")

    def counted(way: str) -> str:
        return f"{of(way) / of('kombu'):.2f}"

    return [
        _said(
            "What was not delayed takes {} times as many as by Kombu's own transport, a delayed "
            "message {} times, and one by Celery's native delivery {} times",
            [counted("ours"), counted("ours-delayed"), counted("kombu-native")],
        ),
        _said(
            "so a second wait takes {} more",
            [_share(of("ours-delayed-twice") / of("ours-delayed") - 1)],
        ),
        _said(
            "In a worker with its default pool, a delayed task costs {} times the CPU of one "
            "without a delay, and by native delivery {} times",
            in_a_worker("delivery"),
        ),
        Sentence(
            ON_4,
            "In a worker with its default pool, a delayed task costs {} times the CPU of one "
            "without a delay, and {} times by native delivery",
            tuple(in_a_worker("delivery-on-4.3")),
        ),
    ]


def _on_paper() -> list[Sentence]:
    """Return the sentences that extrapolate to a hundred thousand messages per second."""
    hour = figure("hour", "ours", "cpu_us") / 1000  # ms
    burst = figure("burst", "ours", "cpu_us") / 1000
    replicated = figure("lanes", "1 lane", "cpu_us") / figure("lanes", "one node", "cpu_us")
    cores = 100 * hour * replicated
    times = ("whole", "a node lost", "the node back")
    rates = [figure("cluster", time, "release_rate") for time in times]
    ladder = LADDERS["ours"][1]
    per_message = waits(ladder, 3600)
    written = (SIZE + figure("hour", "ours", "header_bytes")) / 1000  # KB
    steps = (per_message + 1) * written
    return [
        _said(
            "Delays of up to an hour take one node {} ms a message. A cluster of three replicates "
            "every step, and took {} times the CPU of a single node for the same burst. That is "
            "{} ms of CPU a message, or {} cores such as these: some {} clusters of three nodes "
            "with 16 cores. Delays of up to 12 s take {} ms, and {} cores.",
            [
                f"{hour:.1f}",
                f"{replicated:.1f}",
                f"{hour * replicated:.1f}",
                _tens(cores),
                _word(cores / 48),
                f"{burst * replicated:.1f}",
                _tens(100 * burst * replicated),
            ],
        ),
        _said(
            "A level queue of a cluster passes on {} to {} messages a second. With {} waits a "
            "message there are {} to pass on, in {} queues of a ladder",
            [
                f"{round(min(rates), -2):,.0f}",
                f"{round(max(rates), -2):,.0f}",
                f"{per_message:.1f}",
                f"{round(per_message * 100_000, -4):,.0f}",
                _queues_of_an_hour(ladder),
            ],
        ),
        _said(
            "{} KB at most here. {} waits and the destination are {} KB a message on every node, "
            "or {} MB a second",
            [f"{written:.1f}", f"{per_message:.1f}", f"{steps:.1f}", _tens(100 * steps)],
        ),
    ]


def _publishing() -> list[Sentence]:
    def both(row: str, name: str) -> list[float]:
        return [figure(result, row, name, "ratio") for result in _PAIRS]

    batch, delayed = both("batch", "rate"), both("batch-delayed", "rate")
    native, plain = (sorted(both(row, "cpu_us")) for row in ("celery-delayed", "undelayed"))
    celery = both("celery-undelayed", "cpu_us")
    of_ours, of_kombu = (
        figure("amendments", "publish_instructions", way) for way in ("ours", "kombu")
    )
    fanout, topic = (
        figure("publishing", row, "rate") for row in ("batch-delayed", "batch-by-level")
    )
    return [
        _said(
            "An undelayed publish costs {} to {} times as much as on Kombu's own transport; by "
            "Celery it costs {} times as much, and a delayed one {} to {} times one by Celery's "
            "native delivery",
            [f"{each:.2f}" for each in (*plain, sum(celery) / 2, *native)],
        ),
        _said(
            "Of {} of Python's instructions, {} are not Kombu's own",
            [f"{of_ours:,.0f}", f"{of_ours - of_kombu:.0f}"],
        ),
        _said(
            "messages are confirmed {} times as fast as one by one on RabbitMQ 3.10, and {} times "
            "on 4.3; delayed ones {} and {} times",
            [f"{each:.0f}" for each in (*batch, *delayed)],
        ),
        _said(
            "the message enters there: {} times as many messages a second",
            [f"{fanout / topic:.1f}"],
        ),
    ]


def _spark() -> list[Sentence]:
    def core_hours(row: str) -> float:
        """Return the core-hours of a hundred million tasks, measured on two cores."""
        return 1e8 / figure("spark", row, "rate") * 2 / 3600

    text = "a plan takes {} core-hours and an audit {}"
    figures = (f"{core_hours('plan: 20,000,000'):.2g}", f"{core_hours('audit: 20,000,000'):.2g}")
    publishing = (f"{core_hours('publish: Spark'):.2g}",)
    return [
        Sentence(PERFORMANCE, text, figures),
        Sentence(PERFORMANCE, "publishing takes {} core-hours of executors and broker", publishing),
    ]


def _glance() -> list[Sentence]:
    old, new = _burst("burst"), _burst("burst-on-4.3")
    pairs = [figure(each, "celery-delayed", "cpu_us", "ratio") for each in _PAIRS]
    batches = [figure(each, "batch-delayed", "cpu_us", "ratio") for each in _PAIRS]
    return [
        Sentence(GLANCE, text, tuple(figures))
        for text, *figures in (
            (
                "**{} of what Celery's native delivery costs** on RabbitMQ 3.10, and {} on 4.3",
                old[0].capitalize(),
                new[0],
            ),
            (
                (
                    "**99 of 100 come within {} ms** in the same burst on RabbitMQ 3.10, and "
                    "within {} s by Celery's native delivery; on 4.3, within {} ms, and {} s"
                ),
                *old[1:],
                *new[1:],
            ),
            (
                "**{} a second**, {} times as many as by Celery's native delivery, held for",
                f"{_rate('sustained', 'ours'):,.0f}",
                _word(beside_native("sustained")),
            ),
            (
                "For longer, by the CPU that they take, it is {}, {} times as many",
                f"{steady():,.0f}",
                _word(steady() / steady(way="celery-native")),
            ),
            (
                "A slower machine carried {} for",
                f"{_rate(_SLOWER, 'ours'):,.0f}",
            ),
            (
                "**{} KB of the broker's memory each**",
                f"{figure('waiting-on-4.3', '10000000', 'memory_per_message') / 1000:.1f}",
            ),
            ("takes [{} KB for each]", f"{figure('worker', 'celery', 'per_task') / 1000:.0f}"),
            ("**{} times a publish by", f"{sum(pairs) / 2:.2f}"),
            ("costs {} of one that is confirmed by itself", _share(sum(batches) / 2)),
        )
    ]


def _amendments() -> list[Sentence]:
    def of(name: str, case: str) -> float:
        return figure("amendments", name, case)

    looks = [
        f"{of(name, case):{form}}"
        for name, form in (("look_us", ".1f"), ("look_instructions", ".0f"))
        for case in ("known", "none")
    ]
    not_for_them = (
        of("delivery_instructions", "none")
        - of("delivery_instructions", "kombu")
        - of("look_instructions", "none")
    )
    # Of 100,000 ids.
    memory = of("memory_mb", "together") * 1e6 / 1e5
    apart = [
        figure(result, "catch_up_s", "apart") / figure(result, "catch_up_s", "together")
        for result in ("amendments", "amendments-on-4.3")
    ]
    return [
        _said(
            "To look up whether a message is amended takes {} µs with 100,000 known ids, and {} µs "
            "with none: {} and {} of Python's instructions",
            looks,
        ),
        _said(
            "A delivery takes {} more instructions than on Kombu's own transport that are not",
            [f"{not_for_them:.0f}"],
        ),
        _said("Each cancelled id takes a consumer {} bytes", [_tens(memory)]),
        _said(
            "On RabbitMQ 3.10 that takes {} times as long where each record was confirmed before "
            "the next was written, since the stream then stores and reads each by itself, and on "
            "4.3 {} times",
            [f"{apart[0]:.0f}", f"{apart[1]:.1f}"],
        ),
    ]


def _tick() -> list[Sentence]:
    page = "docs/explanation/tick.md"
    late = (f"{figure('tick', '125', name):.0f}" for name in ("p50", "p99"))
    cpu = [
        figure("tick", tick, "cpu_us", "ratio")
        for tick in ("1000", "500", "250", "125", "62", "31")
    ]
    more = [finer / coarser - 1 for coarser, finer in pairwise(cpu)]
    return [
        Sentence(
            page,
            "A task that is late by {} ms at the median, and by {} ms at the 99th percentile",
            tuple(late),
        ),
        Sentence(
            page,
            "Down to 125 ms, it costs up to {} more of the broker's CPU, and below that {} or more",
            (_share(max(more[:3])), _share(min(more[3:]))),
        ),
    ]


def _prefetch() -> list[Sentence]:
    def both(name: str) -> list[str]:
        ratios = (figure(each, "128", name, "ratio") for each in ("prefetch", "prefetch-on-4.3"))
        return [f"{each:.2f}" for each in sorted(ratios)]

    return [
        Sentence(
            "docs/how-to/configure-the-broker.md",
            "the last message arrives in {} to {} of the time, for {} to {} of the CPU",
            (*both("last_ms"), *both("cpu_us")),
        ),
        Sentence(
            "docs/how-to/configure-the-broker.md",
            "in {} of the time on 4.3, and no sooner on 3.10 ({}, of rounds that differ by more, "
            "for {} times the CPU)",
            tuple(
                f"{figure(f'slower-machine/prefetch{on}', '128', name, 'ratio'):.2f}"
                for on, name in (("-on-4.3", "last_ms"), ("", "last_ms"), ("", "cpu_us"))
            ),
        ),
    ]


def _faults() -> list[Sentence]:
    """Return the sentences with the worst lateness around a frozen node, and on amendments."""

    def run(case: str, broker: str) -> dict[str, Any]:
        [found] = (
            row for row in faults.runs() if row["case"] == case and row["broker"].startswith(broker)
        )
        return found

    def seconds(value: float) -> str:
        return f"{value:.1f}"

    frozen, many = "leader frozen for 20 s", "100,000 amendments at the start"
    waits = [run(many, each)["notes"]["seconds until the first message"] for each in ("4.3", "3.1")]
    worst = [
        f"{run(case, broker)['late'][-1]:.0f}"
        for case, broker in (
            (frozen, "4.3"),
            (f"{frozen}, net_ticktime 8 s", "4.3"),
            (frozen, "3.1"),
        )
    ]
    twice = [
        (row["duplicates"], row["confirmed"])
        for row in faults.runs()
        if row["case"].startswith(frozen)
    ]
    return [
        Sentence(
            "docs/how-to/configure-the-broker.md",
            "was frozen for 20 s: to {} of {} messages at most",
            tuple(map(str, max(twice))),
        ),
        Sentence(
            "docs/how-to/configure-the-broker.md",
            "messages were late by up to {} s when their leader was frozen for 20 s, and by up to "
            "{} s with a `net_ticktime` of 8 s ([table](../explanation/faults.md#a-cluster-of-"
            "three)). On 3.10, they were late by up to {} s with",
            tuple(worst),
        ),
        Sentence(
            "docs/explanation/faults.md",
            "had its first message {} s after its process began on RabbitMQ 4.3, and after {} s on",
            tuple(map(seconds, waits)),
        ),
    ]


def _wal() -> list[Sentence]:
    page = "docs/how-to/configure-the-broker.md"
    cpu, rate = (figure("wal", "64", name, "ratio") for name in ("cpu_us", "rate"))
    slower = figure("slower-machine/wal", "64", "cpu_us", "ratio")
    return [
        Sentence(page, "it took {} times the CPU on 3.10, and was as fast", (f"{slower:.1f}",)),
        Sentence(page, "publishing took {} times the CPU on 3.10", (f"{cpu:.1f}",)),
        Sentence(page, "was slower by {}, when", (_share(1 - rate),)),
    ]


def _word(value: float) -> str:
    return _WORDS[round(value)] if round(value) < len(_WORDS) else f"{value:.0f}"


def _share(value: float) -> str:
    """Return a share as text: one tenth as a word, all others in per cent."""
    return "a tenth" if 0.095 <= value < 0.115 else f"{100 * value:.0f} %"


def _queues_of_an_hour(ladder: Ladder) -> str:
    used = ladder.radices[-len(ladder.digits(3_600_000)) :]
    return str(queues(Ladder(ladder.tick, used)))


def _tens(value: float) -> str:
    return f"{round(value, -1):.0f}"


def write(page: str, name: str) -> str:
    """Return a page with its figures replaced."""
    for sentence in sentences():
        if sentence.page == name:
            page = insert(page, sentence)
    return page


def insert(page: str, sentence: Sentence) -> str:
    """Return a page with the figures of one sentence replaced.

    :raises ValueError: if the page does not have the sentence exactly once.
    """
    pieces = [r"\s+".join(map(re.escape, piece.split(" "))) for piece in sentence.text.split("{}")]
    pattern = pieces[0] + "".join(f"({_FIGURE}){piece}" for piece in pieces[1:])
    found = list(re.finditer(pattern, page))
    if len(found) != 1:
        raise ValueError(
            f"{sentence.page} has {len(found)} times, in place of once: {sentence.text!r}. "
            "Change docs/generate/sentences.py with the page."
        )
    (match,) = found
    # From the last to the first, so that the other positions stay valid.
    for number, text in reversed(list(enumerate(sentence.figures, 1))):
        if match[number].split() != text.split():
            page = page[: match.start(number)] + text + page[match.end(number) :]
    return page
