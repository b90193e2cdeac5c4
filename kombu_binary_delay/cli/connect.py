"""Find the broker and the settings: from a Celery app, options or the environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import click
from amqp.exceptions import AccessRefused
from kombu import Connection
from kombu.transport import pyamqp, resolve_transport

from kombu_binary_delay import operate
from kombu_binary_delay.amendments.parts import amendments_part
from kombu_binary_delay.celery_side.failures import NOTHING
from kombu_binary_delay.celery_side.urls import check_url, for_kombus_transport
from kombu_binary_delay.errors import SettingsError
from kombu_binary_delay.journal import stream_part
from kombu_binary_delay.ladder.foreign import FOREIGN_LADDERS, ladder_of_name
from kombu_binary_delay.ladder.parts import Part
from kombu_binary_delay.ladder.recognise import topology_of_name
from kombu_binary_delay.ladder.topology import VERSION, Topology
from kombu_binary_delay.ladder.versions import why_no_streams
from kombu_binary_delay.operate.probe import Probe
from kombu_binary_delay.schedules import Schedules
from kombu_binary_delay.settings import KEY, Settings
from kombu_binary_delay.wire.draining import PATIENT

DEFAULT_URL = "amqp://guest:guest@localhost//"
_OF_A_LADDER = (
    "tick",
    "levels",
    "radix",
    "layout",
    "queue_type",
    "foreign_ladder",
    "namespace",
    "lanes",
)


@dataclass
class Target:
    """A broker and its settings, from the options of the group."""

    url: str = DEFAULT_URL
    ssl: Any = None
    login_method: str | None = None
    #: Connection parameters for what the URL does not name, as Celery passes them to Kombu.
    defaults: Mapping[str, Any] = field(default_factory=dict, repr=False)
    management_url: str | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    #: The option or setting that names the broker, for error messages.
    option: str = NOTHING
    #: The Celery app, if one was named.
    app: Any = field(default=None, repr=False)

    @classmethod
    def of(
        cls, app: Any, url: str | None, management_url: str | None, given: Mapping[str, Any]
    ) -> Target:
        """Return a target from a Celery app's configuration, overridden by options.

        :raises click.UsageError: for an invalid broker or invalid settings.
        """
        ssl = login_method = None
        option = "--broker" if url else NOTHING
        defaults: Mapping[str, Any] = {}
        if app is not None:
            given = {**_settings_of(app), **given}
            if url is None:
                option = "the Celery app's broker_url"
                url = app.conf.broker_write_url or app.conf.broker_url
                ssl = app.conf.broker_use_ssl or _is_over_tls(app.conf.broker_transport)
                login_method = app.conf.broker_login_method
                # Without a URL, Celery connects to this host, and our default URL would name a
                # user.
                url = url or "localhost"
                defaults = {
                    "userid": app.conf.broker_user,
                    "password": app.conf.broker_password,
                    "virtual_host": app.conf.broker_vhost,
                    "port": app.conf.broker_port,
                }
        if isinstance(url, (list, tuple)):
            url = ";".join(url)
        url = url or DEFAULT_URL
        try:
            check_url(url)
        except ValueError as exc:
            raise click.UsageError(str(exc)) from exc.__cause__
        url, said = for_kombus_transport(url)
        # As in our transport, the URL's TLS parameters override the app's.
        return cls(url, said or ssl, login_method, defaults, management_url, given, option, app)

    @property
    def settings(self) -> Settings:
        """The settings, as the transport would read them."""
        return Settings.from_transport_options({KEY: self.given})

    def plain(self) -> Any:
        """Return a connection by Kombu's own transport."""
        return self._connect()

    def delaying(self, **other: Any) -> Any:
        """Return a connection by our transport; what a subcommand sends gets no jitter.

        :param other: settings in place of the program's.
        """
        given = {**self.given, "jitter": 0, **other}
        return self._connect("kombu_binary_delay:Transport", **{KEY: given})

    def _connect(self, transport: str | None = None, **options: Any) -> Any:
        return Connection(
            self.url,
            ssl=self.ssl or False,
            login_method=self.login_method,
            connect_timeout=10,
            transport=transport,
            transport_options={"socket_settings": PATIENT, **options},
            **self.defaults,
        )

    def lanes(
        self,
        connection: Any = None,
        ladder: str | None = None,
        *,
        ahead: bool = False,
        server: Mapping[str, Any] | None = None,
    ) -> list[Topology]:
        """Return the topologies of the ladders that are used side by side; most often one.

        :param ahead: whether to include the one for urgent messages even if it does not exist yet.
        :param server: the properties of a broker without a connection, to include it if needed.
        """
        topology = self.topology(ladder)
        lanes = [topology] if ladder is not None else topology.lanes(self.settings.lanes)
        if not topology.is_ours or topology.lane or topology.urgent:
            return lanes
        urgent = topology.for_urgent()
        if connection is None:
            return [*lanes, urgent] if topology.keeps_urgent_apart(server or {}) else lanes
        needed = ahead and topology.keeps_urgent_apart(connection.connection.server_properties)
        # RabbitMQ 4.3 answers only who has a permission on the name, and needs no such ladder.
        with Probe(connection) as probe, suppress(AccessRefused):
            # It may be from before an upgrade.
            needed = needed or any(map(probe.has_exchange, (urgent.level_name(0), urgent.direct)))
        return [*lanes, urgent] if needed else lanes

    def filled(self, connection: Any, ladder: str | None = None) -> list[Topology]:
        """Return the topologies among which a connection by our transport chooses to publish.

        Unlike :meth:`lanes`, this leaves out a ladder for urgent messages that the broker's release
        does not need: it only drains.
        """
        return self.lanes(ladder=ladder, server=connection.connection.server_properties)

    def part(self, lanes: Sequence[Topology]) -> Part:
        """Return all parts of ladders that lead to one delivery side."""
        direct = self.settings.queue_per_delay
        wholes = [part for lane in lanes for part in lane.parts(direct=direct).values()]
        return sum(wholes, Part()).distinct()

    def streams(self, connection: Any = None) -> dict[str, Part]:
        """Return what ``amendments`` and the ``journal`` need on the broker, by these names.

        Each is empty if the settings do not enable it, or the broker may have no streams.

        :param connection: to the broker; None for any broker with streams.
        """
        broker = connection and connection.connection
        if broker and why_no_streams(broker.server_properties, broker.host):
            return {"amendments": Part(), "journal": Part()}
        amendments = amendments_part(self.settings) if self.settings.amendments else Part()
        return {"amendments": amendments, "journal": stream_part(self.settings)}

    def expected(self, connection: Any, ladder: str | None = None) -> operate.Expected:
        """Return what should exist of the named ladder, or of those of the settings."""
        settings = self.settings
        declares = settings.declare != "never"
        drained = False
        if ladder is not None:
            # Nothing is asked of a ladder that was not named.
            used = self.topology()
            own = (*used.lanes(settings.lanes), used.for_urgent())
            drained = self.topology(ladder) not in own
        lanes = self.lanes(connection, ladder, ahead=not (declares or drained))
        return operate.Expected(
            tuple(lanes),
            declares,
            settings.relays,
            settings.queue_per_delay,
            tuple(lanes) if drained else (),
        )

    def verify(
        self, connection: Any, ladder: str | None = None, *, user: str | None = None
    ) -> list[operate.Verification]:
        """Compare the broker with what is :meth:`expected`, one ladder after the other.

        :param user: as for :func:`.operate.verify`.
        """
        expected, management = self.expected(connection, ladder), self.management(connection)
        # Amendments and the journal belong to all lanes.
        used = () if expected.drained else self.filled(connection, ladder)
        shared = {
            **self.streams(connection),
            "lanes": used,
            "schedules": self.schedules(connection),
        }
        return [
            operate.verify(
                management,
                lane,
                declares=expected.declares,
                direct=expected.direct,
                relays=expected.relays,
                must_exist=ladder is not None,
                drained=lane in expected.drained,
                user=user,
                **(shared if lane is expected.lanes[0] else {"lanes": ()}),
            )
            for lane in expected.lanes
        ]

    def schedules(self, connection: Any) -> tuple[Schedules, ...]:
        """Return the schedules of all apps on the broker."""
        management = self.management(connection)
        return operate.scheduled(connection, management, self.settings.namespace)

    def fix(self, connection: Any, ladder: str | None = None) -> operate.Creation:
        """Make what :meth:`verify` finds missing; see :func:`.operate.fix`."""
        expected = self.expected(connection, ladder)
        return operate.fix(
            connection,
            self.management(connection),
            expected.lanes,
            declares=expected.declares,
            direct=expected.direct,
            relays=expected.relays,
            must_exist=ladder is not None,
            drained=bool(expected.drained),
            **self.streams(connection),
        )

    def on(self, topology: Topology) -> Target:
        """Return a target with another of our ladders in place of that of the settings."""
        if topology.lane:
            raise click.BadParameter(
                f"{topology.prefix} is one of several lanes, among which a message finds its own; "
                f"to fill them, say how many there are with --lanes, and do not name one"
            )
        if topology.urgent:
            raise click.BadParameter(
                f"{topology.prefix} is only for messages of a high priority, on RabbitMQ 4.0 to "
                f"4.2: they find it themselves; name {replace(topology, urgent=False).prefix}"
            )
        if [topology] == self.settings.topology().lanes(self.settings.lanes):
            return self
        given = {
            **{name: value for name, value in self.given.items() if name not in _OF_A_LADDER},
            "tick": topology.ladder.tick,
            "radix": topology.ladder.radices,
            "layout": topology.layout,
            "queue_type": topology.queue_type,
            "namespace": topology.namespace,
        }
        return replace(self, given=given)

    def management(self, connection: Any) -> operate.Management:
        """Return the management API of a connection's broker."""
        return operate.Management.of(connection, self.management_url)

    def topology(self, ladder: str | None = None) -> Topology:
        """Return the topology of a named ladder, or of the settings."""
        if ladder is None:
            return self.settings.topology()
        other = FOREIGN_LADDERS.get(ladder) or ladder_of_name(f"{ladder}delivery")
        if other is not None:
            return other
        for name in (ladder, f"{self.settings.namespace}.{VERSION}-{ladder}"):
            named = topology_of_name(f"{name}.")
            if named is not None and named.prefix == name:
                return named
        example = f"{self.settings.namespace}.{VERSION}-125ms-2x31-classic"
        raise click.BadParameter(
            f"{ladder!r} is no ladder's name, such as '125ms-2x31', {example!r}, "
            f"or {', '.join(map(repr, FOREIGN_LADDERS))}"
        )


def _settings_of(app: Any) -> Mapping[str, Any]:
    options = app.conf.broker_transport_options or {}
    given = options.get(KEY) or {}
    try:
        # An option can replace an invalid value, but not what stands in the wrong place.
        Settings.from_transport_options(
            {**options, KEY: {} if isinstance(given, Mapping) else given}
        )
    except SettingsError as exc:
        raise click.UsageError(str(exc)) from exc
    return given


def _is_over_tls(transport: Any) -> bool:
    """Return whether a transport that is named beside the URL uses TLS, whatever the URL says."""
    if not transport:
        return False
    try:
        return issubclass(resolve_transport(transport), pyamqp.SSLTransport)
    except (KeyError, ImportError, AttributeError) as exc:
        raise click.UsageError(f"the transport {transport!r} cannot be loaded: {exc}") from exc
