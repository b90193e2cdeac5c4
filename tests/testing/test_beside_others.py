"""The kit beside other tools of tests: each file is one as its users write it."""

import subprocess
import sys

SHOP = """
from celery import Celery
from kombu_binary_delay.testing import Delayed, call

app = Celery("shop", broker="amqp://", backend="cache+memory://")
app.conf.broker_transport = "kombu_binary_delay:Transport"
sent = []

@app.task
def remind(order):
    sent.append(order)
"""
FILES = {
    "test_unittest.py": """
import unittest
from shop import *

class Reminders(unittest.TestCase):
    def test_one_is_sent(self):
        delayed = self.enterContext(Delayed())
        remind.apply_async((7,), countdown=3600)
        delayed.advance(hours=1)
        self.assertEqual(sent, [7])
""",
    "test_asyncio.py": """
import asyncio, unittest
from shop import *

class Reminders(unittest.IsolatedAsyncioTestCase):
    async def test_those_of_threads_are_sent_too(self):
        with Delayed() as delayed:
            await asyncio.to_thread(remind.apply_async, (8,), countdown=60)
            await asyncio.sleep(0.01)
            assert delayed.waiting() == [call(remind, 8, due_in=60)]
            delayed.advance(minutes=1)
        assert sent == [8]
""",
    "test_celery_app.py": """
import pytest
from celery.contrib.pytest import *

@pytest.fixture
def celery_config():
    transport = "kombu_binary_delay:Transport"
    return {"broker_url": "amqp://", "broker_transport": transport}

@pytest.fixture(params=["app first", "kit first"])
def both(request):
    names = ["celery_app", "delayed"]
    for name in names if request.param == "app first" else names[::-1]:
        request.getfixturevalue(name)

def test_it_runs_its_tasks(both, celery_app, delayed):
    @celery_app.task
    def add(first, second):
        return first + second

    add.apply_async((1, 2), countdown=60)
    delayed.advance(minutes=1)
    assert [ran.result for ran in delayed.ran()] == [3]
""",
}


def test_the_kit_works_beside_unittest_asyncio_celerys_fixtures_and_xdist(tmp_path):
    for name, text in {"shop.py": SHOP, **FILES}.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "4 passed" in done.stdout, done.stdout
