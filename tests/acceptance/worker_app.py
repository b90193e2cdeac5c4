"""What `celery -A` takes: the app of the deployment that the environment names."""

from tests.acceptance.app import Deployment, keep_journal_of_messages, make_app

_deployment = Deployment.from_environment()
keep_journal_of_messages(_deployment)
app = make_app(_deployment)
