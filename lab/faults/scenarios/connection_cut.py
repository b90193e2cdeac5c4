"""The connection is cut at random points: in handshakes, declarations, publishes and deliveries.

Publishers and consumers recover by kombu's own means, a Celery worker by Celery's. The ladder does
not stand yet: what is declared lazily is declared between cuts, and again after them.
"""

from __future__ import annotations

from lab.faults.lab import Case, Lab
from lab.faults.ledger import CONFIRMED, DONE
from lab.faults.proxy import Proxy

#: Bytes that a connection carries before it is cut. A handshake takes about two thousand.
BUDGET = (500, 200_000)


def parties_cut(lab: Lab) -> None:
    """Cut publisher and consumer."""
    count = 300 if lab.short else 1500
    lab.queue("inbox")
    with Proxy(lab.broker.ports[0], BUDGET) as proxy:
        urls = lab.proxied(proxy)
        lab.consumer("inbox", urls=urls)
        publisher = lab.publisher(["inbox"], count, urls=urls)
        publisher.wait(count / 100 + 120)
        lab.wait_for(DONE, count // 8, timeout=120)
        # Each cut takes kombu seconds to get over: let it come to an end.
        proxy.budget = None
        lab.settle()
        lab.notes["cuts"] = proxy.cuts
    lab.check("publishes that raised", lab.verdict().refused, 0)


def worker_cut(lab: Lab) -> None:
    """Cut a Celery worker, and the application that sends it tasks."""
    count = 100 if lab.short else 500
    with Proxy(lab.broker.ports[0], (3000, 100_000)) as proxy:
        urls = lab.proxied(proxy)
        lab.worker("--pool=threads", "--concurrency=2", urls=urls)
        lab.send_tasks(count, urls=urls)
        lab.wait_for(CONFIRMED, count)
        lab.wait_for(DONE, count // 2, timeout=120)
        proxy.budget = None
        lab.settle()
        lab.notes["cuts"] = proxy.cuts


CASES = (
    Case("connection cut", "publisher and consumer", parties_cut, short=True, since=(3, 8)),
    Case("connection cut", "Celery worker", worker_cut, since=(3, 8)),
)
