"""The configuration that we recommend, as RabbitMQ reads it."""

from __future__ import annotations

import os

import pytest

from dev.broker import DEFAULTS, Broker
from kombu_binary_delay.export.broker_config import SETTINGS

ROOT = os.environ.get("RABBITMQ_ROOT")
#: The settings that an application has, with their defaults, as its release ships them.
SHIPPED = """
    {{ok, Text, _}} = erl_prim_loader:get_file(code:where_is_file("{0}.app")),
    {{ok, Tokens, _}} = erl_scan:string(binary_to_list(Text)),
    {{ok, {{application, _, Keys}}}} = erl_parse:parse_term(Tokens),
    proplists:get_value({1}, proplists:get_value(env, Keys)).
"""


@pytest.mark.own_broker
@pytest.mark.slow
@pytest.mark.parametrize("advanced", [None, DEFAULTS], ids=["recommended", "without"])
def test_a_broker_has_the_recommended_values_of_the_settings_that_its_release_has(advanced) -> None:
    with Broker(ROOT, advanced=advanced) as broker:
        for setting in SETTINGS:
            shipped = broker.ctl("eval", SHIPPED.format(setting.application, setting.name)).strip()
            value = broker.ctl(
                "eval", f"application:get_env({setting.application}, {setting.name})."
            ).strip()
            default = "undefined" if shipped == "undefined" else f"{{ok,{shipped}}}"
            is_set = advanced is None and broker.release >= setting.since
            assert value == (f"{{ok,{setting.value}}}" if is_set else default), setting.name
            # What a release does not have, or has by itself, is not recommended.
            if is_set:
                assert shipped not in ("undefined", str(setting.value)), setting.name
