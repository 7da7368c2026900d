"""Submit, follow and account for a job by a client that openapi-python-client made: ``use_generated.py URL KEY``."""

import json
import sys

from generated import AuthenticatedClient
from generated.api.carbon_aware import get_current_emissions_forecasts, list_emissions_by_location
from generated.api.events import follow_job_events
from generated.api.footprint import get_job_footprint, report_footprint
from generated.api.jobs import cancel_job, get_job, list_jobs, submit_job
from generated.models import JobSpec, Problem

client = AuthenticatedClient(base_url=sys.argv[1], token=sys.argv[2], raise_on_unexpected_status=True)

spec = JobSpec.from_dict({"name": "generated", "command": ["true"], "gpus": {"min": 1, "max": 4}})
made = submit_job.sync(client=client, body=spec, idempotency_key="generated-1")
again = submit_job.sync(client=client, body=spec, idempotency_key="generated-1")
cancelled = cancel_job.sync(made.id, client=client)
unknown = get_job.sync("job_00000000000000000000000000", client=client)
assert isinstance(unknown, Problem)
found = {
    "ids": [made.id, again.id, get_job.sync(made.id, client=client).id],
    "listed": [job.name for job in list_jobs.sync(client=client, name="generated").items],
    "state": cancelled.state,
    "events": follow_job_events.sync(made.id, client=client),
    "energy_j": get_job_footprint.sync(made.id, client=client).footprint.energy_j,
    "lines": len(report_footprint.sync(client=client).lines),
    "ratings": [each.rating for each in list_emissions_by_location.sync(client=client, location="GB")],
    "forecast": [
        len(each.forecast_data) for each in get_current_emissions_forecasts.sync(client=client, location=["GB"])
    ],
    "code": unknown.code,
}
print(json.dumps(found))
