"""The defects of RabbitMQ, Celery and Kombu that this package meets, as data. Pure.

Each row says what its source says, no more: a series that the source does not name is not listed,
although it may have the defect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .versions import numbers

Version = tuple[int, ...]
RABBITMQ, CELERY, KOMBU = "RabbitMQ", "Celery", "Kombu"

_GITHUB = "https://github.com"
_SERVER = f"{_GITHUB}/rabbitmq/rabbitmq-server"


@dataclass(frozen=True)
class Defect:
    """A defect of some releases of a product.

    :param what: what it does, in the words of this package.
    :param source: the address that says so.
    :param fixed: the first release without it, of each series that has a fix.
    :param since: the first release with it that the source names.
    :param brokers: from which RabbitMQ on, and before which, it shows; for another product.
    """

    product: str
    what: str
    source: str
    fixed: tuple[Version, ...]
    since: Version = ()
    brokers: tuple[Version, Version] = ((), (1000,))

    @property
    def name(self) -> str:
        """Its number, such as ``rabbitmq-server#16652``."""
        repository, _, number = self.source.split("/")[-3:]
        return f"{repository}#{number}"

    def cure(self, version: Version) -> Version | None:
        """Return the release to upgrade to from one that has the defect; None from one without."""
        if version < self.since:
            return None
        # A series with a fix of its own needs no other's.
        same = [fixed for fixed in self.fixed if fixed[:2] == version[:2]]
        return min((fixed for fixed in same or self.fixed if fixed > version), default=None)


DEFECTS = (
    Defect(
        RABBITMQ,
        "a level whose members change, as when a node is replaced, can stop for good",
        f"{_SERVER}/issues/16652",
        fixed=((4, 3, 3),),
        since=(4, 2),
    ),
    Defect(
        RABBITMQ,
        "a level can send the commands of its dead-letter worker to the wrong member",
        f"{_SERVER}/pull/16203",
        fixed=((4, 2, 7), (4, 3, 1)),
        since=(4, 2),
    ),
    Defect(
        RABBITMQ,
        "queues that are from 3.13 can report no counts after a restart, so status does not see "
        "what waits",
        f"{_SERVER}/issues/16974",
        fixed=((4, 3, 4),),
        since=(4, 3),
    ),
    Defect(
        RABBITMQ,
        "a user without the permission configure may not ask whether the ladder exists",
        f"{_SERVER}/pull/16272",
        fixed=((4, 2, 7), (4, 3, 1)),
        since=(4, 2, 6),
    ),
    Defect(
        RABBITMQ,
        "a message that a program without this transport publishes again with its x-death header "
        "is lost, as in a cycle of dead letters",
        f"{_SERVER}/pull/11339",
        fixed=((4, 0, 1),),
    ),
    Defect(
        CELERY,
        "a worker that has merged the revokes of another host can forget new ones at once, which "
        "matters where they are not recorded",
        f"{_GITHUB}/celery/celery/pull/10668",
        fixed=((5, 7),),
    ),
    Defect(
        CELERY,
        "RabbitMQ refuses the queues of remote control and events, unless control_queue_exclusive "
        "and event_queue_exclusive are True, from 5.6 on",
        f"{_GITHUB}/celery/celery/pull/10290",
        fixed=((5, 7),),
        brokers=((4, 3), (1000,)),
    ),
    Defect(
        CELERY,
        "native delayed delivery, which workers without this transport use, loses a task at its "
        "second retry",
        f"{_GITHUB}/celery/celery/pull/10112",
        fixed=((5, 6, 3),),
        since=(5, 5),
        brokers=((), (4, 0, 1)),
    ),
    Defect(
        KOMBU,
        "RabbitMQ refuses the queues of a Mailbox without queue_exclusive, from 5.6 on",
        f"{_GITHUB}/celery/kombu/pull/2531",
        fixed=((5, 7),),
        brokers=((4, 3), (1000,)),
    ),
)


class Known(NamedTuple):
    """A defect of a release that runs: what has it, what it is, and what to do."""

    release: str
    has: str
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.release} {self.has}: {self.what}; {self.remedy}"


def defects_of(rabbitmq: str, others: Mapping[str, str] | None = None) -> Iterator[Known]:
    """Yield each defect that releases have together.

    :param rabbitmq: the broker's version; empty for another broker, which then has none.
    :param others: the versions of Celery and Kombu, by product.
    """
    broker = numbers(rabbitmq)
    versions = {RABBITMQ: rabbitmq, **(others or {})} if broker else {}
    for defect in DEFECTS:
        version = versions.get(defect.product, "")
        first, last = defect.brokers
        cure = defect.cure(numbers(version)) if version else None
        if cure is not None and first <= broker < last:
            yield Known(
                f"{defect.product} {version}",
                f"has {defect.name}",
                defect.what,
                f"upgrade to {written(cure)}",
            )


def written(version: Version) -> str:
    """Write a version such as ``(4, 3, 3)``."""
    return ".".join(map(str, version))
