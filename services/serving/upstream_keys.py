"""The keys that servers ask for, of registered endpoints and of instances, opened for routers and nobody else."""

from services.contracts.routing import UpstreamKey, UpstreamKeys
from services.db.sealing import Sealer, SealError, open_instance_key
from services.kit.logging import Log
from services.serving.repository import ServingRepository
from services.serving.routing import server_id

log = Log(__name__)


async def open_upstream_keys(repository: ServingRepository, sealer: Sealer) -> UpstreamKeys:
    """Return the keys that can be opened, and why the others cannot be had."""
    async with repository.reading() as queries:
        rows, instances = await queries.routing.keys(), await queries.routing.instance_keys()
    opened: list[UpstreamKey] = []
    missing: dict[str, str] = {}
    for row in rows:
        server = server_id(row.endpoint)
        try:
            value = sealer.open(row.sealed, row.tenant_id, "", row.secret)
        except SealError:
            log.error("secret.not_opened", secret=row.secret, tenant=row.tenant_id)
            missing[server] = f"The secret {row.secret} was sealed with a key that serving does not have; set it again."
        else:
            opened.append(UpstreamKey(server=server, set_at=row.set_at, value=value))
    for each in instances:
        try:
            key = open_instance_key(sealer, each.sealed, each.tenant_id, each.id)
        except SealError:
            log.error("instance_key.not_opened", instance=each.id)
        else:
            opened.append(UpstreamKey(server=each.id, set_at=each.set_at, value=key))
    return UpstreamKeys(keys=opened, missing=missing)
