"""Purpose: a private, real Prometheus that scrapes a private broker and evaluates rules.

It is Debian's, on 127.0.0.1 and a free port, with a private data folder; `close` removes
everything.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import yaml

from dev.processes import Processes
from dev.service import HOST, START, Service, free_ports, wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SERVER = "/usr/bin/prometheus"
TOOL = "/usr/bin/promtool"


class PrometheusError(RuntimeError):
    """Prometheus is missing, or a request fails."""


class Prometheus(Service):
    """A private Prometheus.

    config: the text of prometheus.yml.
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
        self._argv = [
            SERVER,
            f"--config.file={file}",
            f"--storage.tsdb.path={self.folder / 'data'}",
            f"--web.listen-address={HOST}:{port}",
        ]

    @property
    def folder(self) -> Path:
        """The folder of its data, configuration and log, until `close`."""
        return self._processes.folder

    def start(self, timeout: float = START) -> None:
        """Start it, and wait until it answers."""
        log = self.folder / "console.log"
        process = self._processes.spawn(self._argv, {"PATH": "/usr/bin:/bin"}, log)
        try:
            wait_until(self._answers, timeout, "no answer", process)
        except (TimeoutError, ChildProcessError) as failure:
            raise PrometheusError(f"Prometheus: {failure}\n{log.read_text()}") from None

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Evaluate an expression now; return the labels and value of each series.

        :raises PrometheusError: if it is invalid, with Prometheus's message.
        """
        vector = self._get(f"query?{urlencode({'query': expression})}")["result"]
        return [(series["metric"], float(series["value"][1])) for series in vector]

    def alerts(self) -> dict[str, list[dict[str, str]]]:
        """Return the labels of the alerts that fire, by the alert's name."""
        firing: dict[str, list[dict[str, str]]] = {}
        for alert in self._get("alerts")["alerts"]:
            if alert["state"] == "firing":
                firing.setdefault(alert["labels"]["alertname"], []).append(alert["labels"])
        return firing

    def close(self) -> None:
        """End the process, and remove its folder."""
        self._processes.close()

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
            with refusal:
                raise PrometheusError(refusal.read().decode()) from None
