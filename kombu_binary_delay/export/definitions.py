"""RabbitMQ's own ``definitions.json``, for ``rabbitmqctl import_definitions``. Pure."""

from __future__ import annotations

import json

from kombu_binary_delay.ladder.parts import Part


def definitions(part: Part, vhost: str = "/") -> str:
    """Return a part as JSON definitions that RabbitMQ imports.

    The virtual host must exist. An import adds missing objects, and does not change existing ones.
    """
    document = {
        "exchanges": [
            {
                "name": exchange.name,
                "vhost": vhost,
                "type": exchange.type,
                "durable": True,
                "auto_delete": False,
                "internal": False,
                "arguments": dict(exchange.arguments),
            }
            for exchange in part.exchanges
        ],
        "queues": [
            {
                "name": queue.name,
                "vhost": vhost,
                "durable": True,
                "auto_delete": False,
                "arguments": dict(queue.arguments),
            }
            for queue in part.queues
        ],
        "bindings": [
            {
                "source": binding.source,
                "vhost": vhost,
                "destination": binding.destination,
                "destination_type": "queue" if binding.to_queue else "exchange",
                "routing_key": binding.key,
                "arguments": dict(binding.arguments),
            }
            for binding in part.bindings
        ],
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
