"""Which targets a service has, as far as whoever runs a workflow there may see it."""

from __future__ import annotations

from headgate.client.async_client import Client
from headgate.errors import NotAllowedError
from headgate.runs.remote.tasks import check_targets
from headgate.workflow.workflow import Workflow


async def check_known_targets(client: Client, workflow: Workflow) -> None:
    """Refuse targets that the service does not have, if the token may see which it has."""
    try:
        targets = (await client.list_targets()).targets
    except NotAllowedError:
        return
    check_targets(workflow, [target.id for target in targets])
