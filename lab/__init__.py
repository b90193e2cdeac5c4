"""The lab: real processes for the demo and the tests. Not part of the wheel.

keeper.py  ends what it started, whatever happens to us
broker.py  a private RabbitMQ
worker.py  a real `celery worker`
demo.py    the main job, for everyone to see
"""
