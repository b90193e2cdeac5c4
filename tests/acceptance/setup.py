"""What `celery_setup` is in these tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_celery import CeleryTestSetup

from tests.acceptance.scene import Scene

if TYPE_CHECKING:
    from dev.server import VHost
    from tests.acceptance.app import Deployment

#: What its nodes can be.
PROCESSES, CONTAINERS = "processes", "containers"


class Setup(Scene, CeleryTestSetup):
    """What `celery_setup` is: pytest-celery's clusters, and our scene around them."""

    def __init__(self, vhost: VHost, deployment: Deployment, **clusters: Any) -> None:
        CeleryTestSetup.__init__(self, **clusters)
        Scene.__init__(self, vhost, deployment, clusters["app"])
