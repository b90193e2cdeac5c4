"""Real processes for the demo, the tests and the fault scenarios. Not part of the wheel.

processes.py  ends the processes that it started, whatever happens to us
server.py  a running RabbitMQ, by its URL
broker.py  a private RabbitMQ, to start and stop
worker.py  a real `celery worker`
pytest_nodes.py  broker, backend and worker for pytest-celery, without Docker
demo.py    the main job, for everyone to see
"""
