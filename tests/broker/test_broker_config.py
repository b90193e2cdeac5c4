"""The configuration that we recommend, as RabbitMQ reads it."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext

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
def test_a_broker_has_the_values_that_we_recommend_for_its_release(broker, advanced) -> None:
    with nullcontext(broker) if advanced is None else Broker(ROOT, advanced=advanced) as node:
        # By one call: each starts an Erlang.
        asked = [
            f"application:get_env({setting.application}, {setting.name})" for setting in SETTINGS
        ]
        text = 'io_lib:format("~w~n", [Value])'
        printed = node.ctl("eval", f"lists:flatten([{text} || Value <- [{', '.join(asked)}]]).")
        values = json.loads(printed).splitlines()
        for setting, value in zip(SETTINGS, values, strict=True):
            names = setting.application, setting.name
            # The node would not have started with a name in rabbitmq.conf that it does not know.
            is_set = setting.is_for(node.version) and (advanced is None or setting.conf)
            assert (value == f"{{ok,{setting.value}}}") == bool(is_set), (setting.name, value)
            if is_set and not setting.conf:
                # What a release does not have, or has by itself, is not recommended.
                shipped = node.ctl("eval", SHIPPED.format(*names)).strip()
                assert shipped not in ("undefined", str(setting.value)), setting.name
