"""Four tasks due in an hour, then three due now: print which have run ten seconds later.

The same worker is asked twice, over Kombu's own transport and over ours. Both times it has one
process, a prefetch multiplier of 4, and a quorum queue.

    python -m docs.examples.blocked_worker                    on a private RabbitMQ
    python -m docs.examples.blocked_worker URL [classic]      on yours; the queues stay there
"""

from __future__ import annotations

import subprocess
import sys
import time

from celery import Celery

TRANSPORTS = ("pyamqp", "kombu_binary_delay:Transport")
WORKER = "blocked@example"
TASKS = ["later-1", "later-2", "later-3", "later-4", "now-1", "now-2", "now-3"]


def make_app(url: str, transport: str, queue_type: str) -> Celery:
    app = Celery("blocked", broker=url)
    app.conf.update(
        broker_transport=transport,  # the one line that differs
        task_default_queue=f"blocked.{transport}.{queue_type}",
        task_default_queue_type=queue_type,
        task_ignore_result=True,
        worker_concurrency=1,
        worker_prefetch_multiplier=4,
        worker_redirect_stdouts=False,
    )

    @app.task(name="run")
    def run(name: str) -> None:
        print(name, flush=True)

    return app


def who_ran(*settings: str) -> str:
    app = make_app(*settings)
    command = [sys.executable, "-m", "docs.examples.blocked_worker", "worker", *settings]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        while not app.control.ping(destination=[WORKER], timeout=1) and worker.poll() is None:
            pass
        for name in TASKS[:4]:
            app.send_task("run", [name], countdown=3600)
        time.sleep(2)
        for name in TASKS[4:]:
            app.send_task("run", [name])
        time.sleep(10)
    finally:
        worker.terminate()
        output, _ = worker.communicate()
    return ", ".join(line for line in output.splitlines() if line in TASKS) or "none"


def main(url: str, queue_type: str = "quorum") -> None:
    for transport in TRANSPORTS:
        print(f"{transport}: {who_ran(url, transport, queue_type)}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        make_app(*sys.argv[2:]).worker_main(["worker", "--loglevel=ERROR", "-n", WORKER])
    elif sys.argv[1:]:
        main(*sys.argv[1:])
    else:
        from dev.broker import Broker

        with Broker() as broker:
            print(f"RabbitMQ {broker.version}")
            main(broker.vhost().url)
