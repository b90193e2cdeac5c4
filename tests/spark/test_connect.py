"""The whole pipeline through a Spark Connect server: a client without a JVM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from dev.processes import Processes
from dev.service import free_ports, listens, wait_until
from kombu_binary_delay.spark import schema as s

ROOT = Path(__file__).parents[2]
HOME = Path(pyspark.__file__).parent
SUBMIT = str(HOME / "bin" / "spark-submit")


def log_of(folder):
    return folder / "events"


@pytest.fixture
def server(tmp_path):
    [port] = free_ports(1)
    log_of(tmp_path).mkdir()
    env = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": port,
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.sql.warehouse.dir": tmp_path / "warehouse",
        # As the documentation advises, so that the password stays out of it.
        "spark.sql.redaction.string.regex": r"amqps?://\S+",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": log_of(tmp_path),
    }
    conf = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    launch = [SUBMIT, "--master", "local[2]", "--driver-memory", "1g", *conf]
    launch += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
    log = tmp_path / "server.log"
    with Processes("connect") as processes:
        process = processes.spawn(launch, env, log)
        try:
            wait_until(lambda: listens(port), 300, "no answer", process)
        except (TimeoutError, ChildProcessError) as failure:
            pytest.fail(f"Spark Connect: {failure}\n{log.read_text()}")
        yield f"sc://127.0.0.1:{port}"


@pytest.mark.slow
def test_a_client_of_spark_connect_plans_publishes_and_audits(server, vhost, tmp_path):
    # A process of its own: one that has a JVM cannot be such a client any more.
    script = str(Path(__file__).with_name("connected.py"))
    argv = [sys.executable, script, server, vhost.url, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures == {
        "plan": 40,
        "passed": True,
        "published": [40, 1, 0],
        "again": [0, 40],
        "journal": {s.SCHEDULED: 40, s.RELEASED: 20, s.COMPLETE: 2},
        "followed": {s.OK: 20},
        "verdicts": {s.OK: 20, s.STILL_WAITING: 20},
        "arrived": 20,
        "page": True,
        "in the catalogue": 40,
        "read on": 60,
    }
    files = [path for path in log_of(tmp_path).rglob("*") if path.is_file()]
    logged = "".join(file.read_text(errors="replace") for file in files)
    assert "SparkListenerConnectOperationStarted" in logged
    assert vhost.url not in logged
