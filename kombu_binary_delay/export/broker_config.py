"""RabbitMQ's configuration files with the settings that we recommend. Pure.

:data:`SETTINGS` is the only place for their values. What each costs is measured in
docs/how-to/configure-the-broker.md. A setting is written only for releases that have it, and where
it was measured to help.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from kombu_binary_delay.ladder.versions import release

CONF, ADVANCED = "rabbitmq.conf", "advanced.config"
#: The newest release that we test with.
NEWEST = "4.3"
_HEAD = """\
Settings that kombu-binary-delay recommends for RabbitMQ {}. Made by
'kombu-binary-delay export broker-config'. If you have {} already, copy the
settings into it. They take effect when the node starts.
"""
_NONE = """\
RabbitMQ {} has none of the settings that are recommended for this file.
"""


@dataclass(frozen=True)
class Setting:
    """A setting of RabbitMQ.

    :param application: the Erlang application that has it, in ``advanced.config``.
    :param conf: its name in ``rabbitmq.conf``; None if that cannot set it.
    :param before: the first release for which we no longer do; None if we still do.
    :param does: what it does, and what it costs.
    """

    application: str
    name: str
    value: int
    conf: str | None
    before: tuple[int, ...] | None
    does: str

    def is_for(self, version: str) -> bool:
        """Return whether we recommend it for a release."""
        number = release(version)
        return self.before is None or number < self.before


PREFETCH = Setting(
    "rabbit",
    "dead_letter_worker_consumer_prefetch",
    128,
    None,
    None,
    # More take more memory, and gain little.
    "How many messages that are due each level queue passes on at once; RabbitMQ's default is "
    "32. Messages come sooner when many are due at one moment, for less CPU each. Costs memory: "
    "up to 128 messages of each level queue that has so many due.",
)
SETTINGS = (
    PREFETCH,
    Setting(
        "rabbit",
        "dead_letter_worker_publisher_confirm_timeout",
        5000,
        None,
        None,
        "Milliseconds after which a message that is not confirmed is passed on again; RabbitMQ's "
        "default is 180000. So late are messages whose confirm a crash has lost, or that a full "
        "queue has rejected. Costs duplicates where the next queue takes longer than this to "
        "confirm.",
    ),
    Setting(
        "ra",
        "wal_max_size_bytes",
        64 * 2**20,
        "raft.wal_max_size_bytes",
        # On RabbitMQ 4.3, it makes no difference to the memory.
        (4, 0),
        "How large the write-ahead log of quorum queues becomes before its messages go to files of "
        "their own, and leave the memory; RabbitMQ's default is 536870912, 512 MiB. Saves memory "
        "while many messages wait. Costs the disk smaller writes, more often.",
    ),
)


def broker_config(version: str = NEWEST) -> dict[str, str]:
    """Return the text of each configuration file by its name.

    :param version: a release of RabbitMQ, such as ``"4.3"`` or ``"3.10.8"``.
    """
    settings = [setting for setting in SETTINGS if setting.is_for(version)]
    return {
        CONF: _conf([setting for setting in settings if setting.conf is not None], version),
        ADVANCED: _advanced([setting for setting in settings if setting.conf is None], version),
    }


def _conf(settings: list[Setting], version: str) -> str:
    lines = [_head(CONF, settings, version, "#")]
    lines += [
        f"\n{_comment(setting.does, '#')}{setting.conf} = {setting.value}\n" for setting in settings
    ]
    return "".join(lines)


def _advanced(settings: list[Setting], version: str) -> str:
    by_application: dict[str, list[Setting]] = {}
    for setting in settings:
        by_application.setdefault(setting.application, []).append(setting)
    parts = [f" {{{name}, [\n{_terms(chosen)} ]}}" for name, chosen in by_application.items()]
    body = "[\n" + ",\n".join(parts) + "\n]." if parts else "[]."
    return f"{_head(ADVANCED, settings, version, '%%')}{body}\n"


def _terms(settings: list[Setting]) -> str:
    *others, last = (
        f"{_comment(setting.does, '  %%')}  {{{setting.name}, {setting.value}}}"
        for setting in settings
    )
    return "".join(f"{other},\n" for other in others) + f"{last}\n"


def _head(file: str, settings: list[Setting], version: str, mark: str) -> str:
    number = ".".join(map(str, release(version)))
    text = _HEAD.format(number, file) if settings else _NONE.format(number)
    return "".join(f"{mark} {line}\n" for line in text.splitlines())


def _comment(text: str, mark: str) -> str:
    return "".join(f"{mark} {line}\n" for line in textwrap.wrap(text, 90))
