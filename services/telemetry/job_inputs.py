"""What nodes get for the gangs that they start: secrets, opened for them alone."""

from services.contracts.secrets import OpenedSecret, OpenedSecrets
from services.db.database import Database
from services.db.job_inputs import sealed_secrets
from services.db.sealing import Sealer, SealError, open_instance_key
from services.kit.logging import Log
from services.telemetry.repository.jobs import StartingJob

log = Log(__name__)


async def open_secrets(database: Database, sealer: Sealer, job: StartingJob) -> OpenedSecrets:
    """Return the secrets that a job names with their values, an instance's key too, and why others cannot be had."""
    uses = [str(use["name"]) for use in job.secrets]
    names = list(dict.fromkeys([*uses, job.git_secret] if job.git_secret else uses))
    async with database.connection() as connection:
        found = {row.name: row for row in await sealed_secrets(connection, job.tenant_id, job.project, names)}
    opened: list[OpenedSecret] = []
    missing: list[str] = []
    for name in names:
        row = found.get(name)
        if row is None:
            missing.append(f"The secret {name} does not exist any more.")
            continue
        try:
            opened.append(OpenedSecret(name=name, value=sealer.open(row.sealed, job.tenant_id, row.project, name)))
        except SealError:
            log.error("secret.not_opened", secret=name, tenant=job.tenant_id)
            missing.append(
                f"The secret {name} was sealed with a key that the control plane does not have; set it again."
            )
    return OpenedSecrets(secrets=opened, missing=missing, instance_key=_instance_key(sealer, job))


def _instance_key(sealer: Sealer, job: StartingJob) -> str | None:
    if job.instance is None or job.sealed_key is None:
        return None
    try:
        return open_instance_key(sealer, job.sealed_key, job.tenant_id, job.instance)
    except SealError:
        log.error("instance_key.not_opened", instance=job.instance)
        return None
