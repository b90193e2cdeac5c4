"""The connection is cut at random points: in handshakes, declarations, publishes and deliveries.

Publishers and consumers recover by kombu's own means, a Celery worker by Celery's. The ladder does
not exist yet: what is declared lazily is declared between cuts, and again after them.
"""

from __future__ import annotations

from dev.faults.environment import Case, Environment
from dev.faults.ledger import CONFIRMED, DONE
from dev.faults.proxy import Proxy

#: Bytes that a connection carries before it is cut. A handshake takes about two thousand.
BUDGET = (500, 200_000)


def parties_cut(env: Environment) -> None:
    """Cut publisher and consumer."""
    count = 300 if env.short else 1500
    env.queue("inbox")
    with Proxy(env.broker.ports[0], BUDGET) as proxy:
        urls = env.proxied(proxy)
        env.consumer("inbox", urls=urls)
        publisher = env.publisher(["inbox"], count, urls=urls)
        publisher.wait(count / 100 + 300)
        env.wait_for(DONE, count // 8)
        # Each cut takes kombu seconds to get over: let it come to an end.
        proxy.budget = None
        env.wait_until_done()
        env.notes["cuts"] = proxy.cuts
    env.check("publishes that raised", env.verdict().refused, 0)


def worker_cut(env: Environment) -> None:
    """Cut a Celery worker, and the application that sends it tasks."""
    count = 100 if env.short else 500
    with Proxy(env.broker.ports[0], (3000, 100_000)) as proxy:
        urls = env.proxied(proxy)
        env.worker("--pool=threads", "--concurrency=2", urls=urls)
        env.send_tasks(count, urls=urls)
        env.wait_for(CONFIRMED, count)
        env.wait_for(DONE, count // 2)
        proxy.budget = None
        env.wait_until_done()
        env.notes["cuts"] = proxy.cuts


CASES = (
    Case("connection cut", "publisher and consumer", parties_cut, short=True, since=(3, 8)),
    Case("connection cut", "Celery worker", worker_cut, since=(3, 8)),
)
