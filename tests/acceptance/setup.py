"""What `celery_setup` is in these tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_celery import CeleryTestSetup

from tests.acceptance.system import System

if TYPE_CHECKING:
    from dev.server import VHost
    from tests.acceptance.app import Deployment


class Setup(System, CeleryTestSetup):
    """What `celery_setup` is: pytest-celery's clusters, and what a test sees of them."""

    def __init__(self, vhost: VHost, deployment: Deployment, **clusters: Any) -> None:
        CeleryTestSetup.__init__(self, **clusters)
        System.__init__(self, vhost, deployment, clusters["app"])
