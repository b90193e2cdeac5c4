"""Purpose: nodes for pytest-celery that are processes of this machine, so that no Docker is needed.

pytest-celery runs tests against a broker, a result backend and workers, each a *node* that wraps a
container. Here are nodes of the same classes around processes. To use them, give the fixtures of
pytest-celery others of the same names, and leave all else to it:

    @pytest.fixture(scope="module")
    def celery_broker():
        with Broker() as rabbitmq:                  # dev.broker, or any other dev.server.Server
            yield LocalBroker(rabbitmq)

    @pytest.fixture(scope="module")
    def celery_backend(tmp_path_factory):
        return LocalBackend(tmp_path_factory.mktemp("results"))

    @pytest.fixture(scope="module")
    def celery_worker(celery_broker, celery_backend):
        env = {"BROKER": celery_broker.config()["url"], ...}    # for the app to read
        with Processes("worker") as processes:
            yield LocalWorker(processes, "my.app", env, "--pool=solo")

    def test_a_task_outlives_its_worker(celery_setup):
        result = my_task.apply_async(countdown=1)
        celery_setup.worker.kill()
        celery_setup.worker.restart()
        assert result.get(timeout=10)

What a node promises, these keep: `config`, `ready`, `logs`, `wait_for_log`, `assert_log_exists`,
`name`, `hostname`, `kill` with any signal, `restart`, `teardown`. Scopes wider than one test are
fine. This module knows neither this project's transport nor its tests.
"""

from __future__ import annotations

import os
import signal as signals
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import psutil
from pytest_celery import (
    DEFAULT_WORKER_NAME,
    DEFAULT_WORKER_QUEUE,
    CeleryTestBackend,
    CeleryTestBroker,
    CeleryTestContainer,
    CeleryTestWorker,
)

from dev.broker import Broker
from dev.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import celery

    from dev.processes import Processes
    from dev.server import Server, VHost

RUNNING, EXITED = "running", "exited"


class ProcessContainer(CeleryTestContainer):
    """Whatever a node of pytest-celery asks of its container, answered by a process.

    A subclass says whether it runs, how it is signalled and started again, and what it printed.
    """

    def __init__(self, container_id: str) -> None:
        # Not that of the base class: there is no container of Docker behind this one.
        self._id = container_id

    @property
    def id(self) -> str:
        """Whatever is unique; a node takes the first twelve characters for a host's name."""
        return self._id

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"{type(self).__name__} {self._id}"

    @property
    def status(self) -> str:
        """Docker's words for whether it runs."""
        raise NotImplementedError

    @property
    def attrs(self) -> dict[str, Any]:
        """Docker's own description: there is none."""
        return {}

    def logs(self) -> str:
        """Return all that it printed."""
        return ""

    def reload(self) -> None:
        """Ask Docker again how it is; a process is asked each time."""

    def ready(self) -> bool:
        """Whether it may be used. What starts it waits until it is."""
        return self.status == RUNNING

    def kill(self, signal: str | int = "SIGKILL") -> None:
        """Send a signal, by its name or its number."""
        raise NotImplementedError

    def restart(self, timeout: float = 10) -> None:
        """Stop it, if it runs, and start it again as it was."""
        raise NotImplementedError


class BrokerProcess(ProcessContainer):
    """A virtual host of its own on a RabbitMQ, which may be restarted only if it is our own."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.vhost: VHost = server.vhost()
        super().__init__(self.vhost.name)

    @property
    def celeryconfig(self) -> dict[str, Any]:
        """What an app needs to know."""
        url = self.vhost.url
        return {"url": url, "host_url": url, "vhost": self.vhost.name}

    @property
    def status(self) -> str:
        """Whether the node runs; a broker that is not ours to stop does."""
        return EXITED if isinstance(self.server, Broker) and not self.server.is_running else RUNNING

    def logs(self) -> str:
        """Return what the node printed."""
        return self._broker.log(lines=10_000)

    def kill(self, signal: str | int = "SIGKILL") -> None:
        """SIGKILL, SIGSTOP or SIGCONT to the node, or stop it in order on SIGTERM."""
        actions = {
            signals.SIGKILL: Broker.kill,
            signals.SIGTERM: Broker.stop,
            signals.SIGSTOP: Broker.freeze,
            signals.SIGCONT: Broker.thaw,
        }
        action = actions.get(_number(signal))
        if action is None:
            raise ValueError(f"a broker takes {_list(actions)}, not {signal!r}")
        action(self._broker)

    def restart(self, timeout: float = 120) -> None:
        """Stop and start the node; what is durable is there again."""
        self._broker.stop()
        self._broker.start(timeout)

    def teardown(self) -> None:
        """Delete the virtual host. The RabbitMQ is its owner's."""
        self.vhost.delete()

    @property
    def _broker(self) -> Broker:
        if not isinstance(self.server, Broker):
            raise TypeError(f"{self.server.url} is somebody else's broker, not ours to control")
        return self.server


class ResultFolder(ProcessContainer):
    """Celery's own file system backend: nothing runs, nothing has to be installed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder.name)
        self._folder = folder

    @property
    def celeryconfig(self) -> dict[str, Any]:
        """What an app needs to know."""
        url = f"file://{self._folder}"
        return {"url": url, "host_url": url}

    @property
    def status(self) -> str:
        """Whether there is such a folder."""
        return RUNNING if self._folder.is_dir() else EXITED

    def kill(self, signal: str | int = "SIGKILL") -> None:
        """Refuse: a folder cannot be killed, and a test that relied on it would show nothing."""
        raise TypeError(f"a folder takes no signals, such as {signal!r}")

    def restart(self, timeout: float = 10) -> None:  # noqa: ARG002 - the base class has it
        """Refuse, as `kill` does."""
        raise TypeError("a folder cannot be restarted")


class WorkerProcess(ProcessContainer):
    """A `celery worker`; ready when this returns, and part of what `processes` ends at the last."""

    def __init__(
        self, processes: Processes, app: str, env: Mapping[str, str], *options: str
    ) -> None:
        self._processes, self._app, self._env, self._options = processes, app, env, options
        self._before = ""
        self.worker = self._start(self.worker_name())
        super().__init__(self.worker.name.partition("@")[2])

    @classmethod
    def version(cls) -> str:
        """Return the version of Celery: that of the tests."""
        import celery  # noqa: PLC0415 - whoever has no tests needs none

        return str(celery.__version__)

    @classmethod
    def log_level(cls) -> str:
        """Return the worker's log level."""
        return "INFO"

    @classmethod
    def worker_name(cls) -> str:
        """Return the first part of every worker's name."""
        return str(DEFAULT_WORKER_NAME)

    @classmethod
    def worker_queue(cls) -> str:
        """Return the queue that a worker consumes, unless its options name another."""
        return str(DEFAULT_WORKER_QUEUE)

    @property
    def celeryconfig(self) -> dict[str, Any]:
        """Nobody connects to a worker."""
        return {}

    @property
    def status(self) -> str:
        """Whether its main process lives."""
        return RUNNING if self.worker.is_running else EXITED

    def logs(self) -> str:
        """Return all that it printed, before a restart as well."""
        return self._before + self.worker.log()

    def kill(self, signal: str | int = "SIGKILL") -> None:
        """SIGKILL to the worker and its pool at once; any other signal to its main process."""
        if _number(signal) == signals.SIGKILL:
            self.worker.kill()
        else:
            os.kill(self.worker.pid, _number(signal))

    def restart(self, timeout: float = 120) -> None:
        """Stop it as an administrator would, if it runs, and start it under the same name."""
        self.worker.stop()
        self._before = self.logs()
        self.worker = self._start(self.worker.name, timeout)

    def teardown(self) -> None:
        """Stop it."""
        self.worker.stop()

    def _start(self, name: str, timeout: float = 120) -> Worker:
        return Worker(
            self._processes, self._app, self._env, *self._options, name=name, timeout=timeout
        )


class LocalBroker(CeleryTestBroker):
    """A virtual host on a RabbitMQ: `vhost`, with what is in it."""

    def __init__(self, server: Server) -> None:
        super().__init__(BrokerProcess(server))

    @property
    def vhost(self) -> VHost:
        """What to look into."""
        return cast("BrokerProcess", self.container).vhost


class LocalBackend(CeleryTestBackend):
    """Results in the files of a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(ResultFolder(folder))


class LocalWorker(CeleryTestWorker):
    """A `celery worker` of this machine.

    processes:  ends it at the last.
    module:  what Celery's -A takes.
    env:     more environment variables for it.
    options: more arguments for `celery worker`.
    app:     the app as tests see it.
    """

    def __init__(
        self,
        processes: Processes,
        module: str,
        env: Mapping[str, str],
        *options: str,
        app: celery.Celery | None = None,
    ) -> None:
        super().__init__(WorkerProcess(processes, module, env, *options), app)

    def hostname(self) -> str:
        """Return its name, as Celery's remote control knows it."""
        return cast("WorkerProcess", self.container).worker.name

    def get_running_processes_info(
        self, columns: list[str] | None = None, filters: dict[str, str] | None = None
    ) -> list[dict[str, Any]]:
        """Describe its main process and those of its pool, as `psutil` does."""
        main = psutil.Process(self.container.worker.pid)
        found = []
        for each in (main, *main.children(recursive=True)):
            # A child may end while it is described.
            with suppress(psutil.NoSuchProcess):
                found.append(each.as_dict(columns))
        wanted = (filters or {}).items()
        return [each for each in found if all(each.get(key) == value for key, value in wanted)]


def _number(signal: str | int) -> signals.Signals:
    return signals.Signals[signal] if isinstance(signal, str) else signals.Signals(signal)


def _list(numbers: Iterable[signals.Signals]) -> str:
    return ", ".join(each.name for each in numbers)
