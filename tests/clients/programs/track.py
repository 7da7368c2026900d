"""Record this job in the active runs, and a job in a run that has ended; print what the runs then hold."""

import json
import sys

import mlflow
import wandb

from wattshift import job
from wattshift.integrations.mlflow import log_footprint

mlflow.set_tracking_uri(f"sqlite:///{sys.argv[1]}/mlflow.db")
before = job.log_footprint()
active = mlflow.start_run()
run = wandb.init(project="wattshift", mode="offline", dir=sys.argv[1], settings=wandb.Settings(console="off"))
recorded = job.log_footprint()
summary, config = dict(run.summary), dict(run.config)
run.finish()
mlflow.end_run()
log_footprint("job_2", run_id=active.info.run_id)
try:
    log_footprint("job_2")
    refused = ""
except RuntimeError as error:
    refused = str(error)
found = mlflow.get_run(active.info.run_id).data
history = mlflow.MlflowClient().get_metric_history(active.info.run_id, "wattshift/energy_kwh")
answer = {
    "before": before,
    "recorded": recorded,
    "refused": refused,
    "metrics": found.metrics,
    "tags": found.tags,
    "energies": [metric.value for metric in history],
    "summary": {name: value for name, value in summary.items() if name.startswith("wattshift/")},
    "config": config,
}
print(json.dumps(answer))
