"""What a worker writes into its log at start."""

from __future__ import annotations

import pytest

from kombu_binary_delay import Settings
from kombu_binary_delay.celery_side.worker_log import known_defects, line

BEGIN = "kombu-binary-delay is on: delayed tasks wait on RabbitMQ 4.3.6 in "


@pytest.mark.parametrize(
    ("given", "ladder", "settings"),
    [
        (
            {},
            (
                "quorum queues of the ladder kbd.v2-125ms-2x8-4x4-16x3-8x1 (16 levels, "
                "tick 125 ms, longest delay 8.51 years)"
            ),
            "the defaults",
        ),
        (
            {"tick": 1000, "radix": 2, "levels": 4, "queue_type": "classic", "relays": ["a*"]},
            (
                "classic queues of the ladder kbd.v2-1000ms-2x4-classic (4 levels, "
                "tick 1 s, longest delay 15 s)"
            ),
            "tick=1000, levels=4, radix=2, queue_type='classic', relays=('a*',)",
        ),
    ],
)
def test_the_line_has_the_ladder_the_broker_and_what_is_not_default(given, ladder, settings):
    made = Settings(**given)

    assert line(made, made.topology(), "4.3.6") == f"{BEGIN}{ladder}; settings: {settings}"


def test_the_line_says_if_the_broker_has_refused_something():
    refused = line(Settings(), Settings().topology(), "4.3.6", is_refused=True)

    assert refused.startswith("kombu-binary-delay is on, but RabbitMQ refused a part of what it")


def test_the_line_says_if_confirms_are_off():
    unconfirmed = line(Settings(), Settings().topology(), "4.3.6", confirms=False)

    assert unconfirmed.endswith(
        "; publisher confirms are off (confirm_publish): what a broken connection loses is lost"
    )


def test_the_defects_of_this_broker_and_of_what_is_installed_here_are_named():
    assert not list(known_defects({"product": "RabbitMQ", "version": "4.3.6"}))
    named = [str(known) for known in known_defects({"product": "RabbitMQ", "version": "4.3.3"})]
    assert [text.partition(":")[0] for text in named] == [
        "RabbitMQ 4.3.3 has rabbitmq-server#16974"
    ]
    assert not list(known_defects({"product": "LavinMQ", "version": "2.0.0"}))
