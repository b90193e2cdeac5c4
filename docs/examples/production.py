"""Celery's settings for production: `app.config_from_object("production")`.

A test of the project runs a worker with them, kills it, and restarts the broker under it.

    celery -A shop worker --autoscale=8,2
"""

import os

# -- the broker ------------------------------------------------------------------------------------

broker_url = os.environ.get("BROKER_URL", "amqp://guest:guest@localhost//")
broker_transport = "kombu_binary_delay:Transport"
# A publish returns when RabbitMQ has the message on the disks of most nodes, and raises if not.
broker_transport_options = {"confirm_publish": True}
task_publish_retry_policy = {"max_retries": 5, "interval_start": 0, "interval_max": 2}
# Workers wait for a broker that is down, however long, also at their start.
broker_connection_retry = True
broker_connection_retry_on_startup = True
broker_connection_max_retries = None
# A connection that is dead is found within a minute.
broker_heartbeat = 30

# -- tasks: at least once, so write them to bear a second run --------------------------------------

# Queues are on several nodes, and survive the loss of one.
task_default_queue_type = "quorum"
# A message is acknowledged when its task has ended, and given to another worker if its own dies.
# RabbitMQ takes a message back after its consumer_timeout, 30 minutes: a task must be shorter.
task_acks_late = True
task_reject_on_worker_lost = True
task_time_limit = 20 * 60
# A task that waits in a busy worker's memory is late.
worker_prefetch_multiplier = 1
# When the connection breaks, RabbitMQ gives the tasks to others: do not run them twice at once.
worker_cancel_long_running_tasks_on_connection_loss = True
# The state STARTED, beside a task's result.
task_track_started = True

# -- stop ------------------------------------------------------------------------------------------

# After SIGQUIT, running tasks have so many seconds, and are then given to others. With
# REMAP_SIGTERM=SIGQUIT in the environment, SIGTERM does the same: service managers send it.
worker_soft_shutdown_timeout = 60
