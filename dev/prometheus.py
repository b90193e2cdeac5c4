"""Purpose: a private, real Prometheus that scrapes a private broker and evaluates rules.

It is Debian's, on 127.0.0.1 and a free port, with a data folder of its own; `close` leaves nothing
behind.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import yaml

from dev.broker import HOST, free_ports
from dev.processes import Processes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SERVER = "/usr/bin/prometheus"
TOOL = "/usr/bin/promtool"


class PrometheusError(RuntimeError):
    """Prometheus is missing, or does not do what it was asked to."""


class Prometheus(AbstractContextManager["Prometheus"]):
    """One Prometheus of our own.

    config: what prometheus.yml says.
    rules:  the text of a file of rules.
    """

    def __init__(self, config: Mapping[str, Any], rules: str) -> None:
        if not os.path.exists(SERVER):  # noqa: PTH110 - a constant
            raise PrometheusError(f"no {SERVER}: run dev/install.sh test")
        self._processes = Processes("prometheus")
        (port,) = free_ports(1)
        self.url = f"http://{HOST}:{port}"
        rules_file, file = self.folder / "rules.yml", self.folder / "prometheus.yml"
        rules_file.write_text(rules)
        file.write_text(yaml.safe_dump({**config, "rule_files": [str(rules_file)]}))
        self._process = self._processes.spawn(
            [
                SERVER,
                f"--config.file={file}",
                f"--storage.tsdb.path={self.folder / 'data'}",
                f"--web.listen-address={HOST}:{port}",
            ],
            {"PATH": "/usr/bin:/bin"},
            self.folder / "console.log",
        )

    @property
    def folder(self) -> Path:
        """Where its data, configuration and log are, until close()."""
        return self._processes.folder

    def wait_until_up(self, timeout: float = 60) -> None:
        """Wait until it answers."""
        end = time.monotonic() + timeout
        while not self._answers():
            if time.monotonic() > end or self._process.poll() is not None:
                log = (self.folder / "console.log").read_text()
                raise PrometheusError(f"Prometheus does not answer\n{log}")
            time.sleep(0.1)

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Evaluate an expression now: labels and value of each series.

        :raises PrometheusError: where it is not one, with its words.
        """
        found = self._get(f"query?{urlencode({'query': expression})}")["result"]
        return [(each["metric"], float(each["value"][1])) for each in found]

    def alerts(self) -> dict[str, list[dict[str, str]]]:
        """Return the labels of the alerts that fire, by the alert's name."""
        firing: dict[str, list[dict[str, str]]] = {}
        for each in self._get("alerts")["alerts"]:
            if each["state"] == "firing":
                firing.setdefault(each["labels"]["alertname"], []).append(each["labels"])
        return firing

    def close(self) -> None:
        """End it: no process and no folder is left."""
        self._processes.close()

    def __enter__(self) -> Prometheus:  # noqa: PYI034, typing.Self is not in Python 3.10
        try:
            self.wait_until_up()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answers(self) -> bool:
        try:
            self.query("vector(1)")
        except (OSError, PrometheusError):
            return False
        return True

    def _get(self, path: str) -> Any:
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}", timeout=30) as answer:  # noqa: S310
                return json.loads(answer.read())["data"]
        except urllib.error.HTTPError as refusal:
            raise PrometheusError(refusal.read().decode()) from None
