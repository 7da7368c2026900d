"""What the server of `forked` has imported before it forks: all that the processes import, but not their own mains."""

import sys
from importlib import import_module

_CELERY = ("celery.apps.worker", "celery.bin.worker", "celery.concurrency.prefork", "kombu.transport.redis")
_MAINS = (
    "carbon_service.app",
    "gateway.app",
    "gpu_agent.app",
    "migrations.run",
    "optimizer_service.app",
    "services.admission.app",
    "services.router.app",
    "services.scheduler.app",
    "services.serving.app",
    "services.simulator.app",
    "services.telemetry.app",
)
_WORKERS = ("optimizer_service.length_model", "optimizer_service.worker", "services.simulator.worker")

for name in (*_CELERY, *_MAINS, *_WORKERS):
    import_module(name)
for name in _MAINS:
    del sys.modules[name]  # it is run, as `python -m` would
