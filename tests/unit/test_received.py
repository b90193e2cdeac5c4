"""What is published again has the bytes that came, whatever py-amqp made of them meanwhile."""

import encodings
import pkgutil
import struct
from types import SimpleNamespace
from typing import Any

import amqp
import pytest
from amqp import spec
from amqp.abstract_channel import AbstractChannel
from amqp.serialization import dumps
from hypothesis import example, given
from hypothesis import strategies as st

from kombu_binary_delay.channel import ChannelMixin
from kombu_binary_delay.publishing.frames import Messages
from kombu_binary_delay.wire.received import copy_of
from tests.unit.test_frames import Wire

#: Those of text and others, and some that do not exist.
ENCODINGS = sorted(module.name for module in pkgutil.iter_modules(encodings.__path__))


class Channel(ChannelMixin, AbstractChannel):
    """A channel without a connection, which decodes what the frames of a delivery contain."""

    _METHODS = amqp.Channel._METHODS  # noqa: SLF001 - it has no other name

    taken: list[Any]

    def _setup_listeners(self):
        self._callbacks[spec.Basic.GetOk] = lambda *args: self.taken.append(args[-1])

    def receive(self, properties, body):
        self.taken = []
        payload = b"\0" * 4 + dumps("Lbssl", (1, False, "", "q", 0))
        content = amqp.Message(frame_method=spec.Basic.GetOk, frame_args=payload)
        sent = amqp.Message(**properties)
        header = struct.pack(">HHQ", spec.Basic.GetOk[0], 0, len(body))
        content.inbound_header(header + sent._serialize_properties())  # noqa: SLF001 - as it is sent
        if body:
            content.inbound_body(body)
        self.dispatch_method(spec.Basic.GetOk, payload, content)
        return self.taken[0]


@pytest.fixture(scope="module", params=[True, False], ids=["decoded", "as it came"])
def channel(request):
    channel = Channel(SimpleNamespace(channels={}), 1)
    channel.auto_decode = request.param
    return channel


def written(body, properties):
    wire = Wire(9000)
    messages = Messages(wire, 1)
    messages.add(body, dict(properties), "", "q", (False, False))
    messages.send()
    return wire.written


@given(
    body=st.binary() | st.text().map(str.encode) | st.text().map(lambda text: text.encode("utf-7")),
    encoding=st.none() | st.sampled_from(ENCODINGS),
)
@example(b"", None)
@example(b"", "utf_16")
@example(b"", "gzip")
@example(b"a\0", "utf_16")
def test_what_is_published_again_is_written_as_it_came(channel, body, encoding):
    properties = {} if encoding is None else {"content_encoding": encoding}
    message = channel.receive(properties, body)

    again = copy_of(message, message.properties)

    assert written(again.body, again.properties) == written(body, properties)
