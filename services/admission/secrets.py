"""Secrets: set, listed and deleted by users; never opened here.

Values are sealed before they reach the database. Telemetry opens them for the nodes that start jobs with them, serving
for the routers that send requests to model servers with them.
"""

from sqlalchemy.ext.asyncio import AsyncEngine

from services.admission.repository.access import AccessRepository, write_audit
from services.admission.repository.uploads import SecretRepository
from services.contracts.codes import ProblemCode
from services.contracts.identity import Identity
from services.contracts.secrets import Secret, SecretList, SecretSpec
from services.db.sealing import Sealer
from services.kit.ids import utc_now
from services.kit.problems import ProblemError, found, not_found

MAX_SECRETS_OF_A_TENANT = 1_000


def no_key() -> ProblemError:
    """Return the error for what cannot be sealed."""
    detail = "This installation keeps no secrets: set WATTSHIFT_SECRETS_KEY for admission, telemetry and serving."
    return ProblemError(409, ProblemCode.CAPABILITY_MISSING, detail)


class Secrets:
    """Manages the secrets of tenants; values go in and never come out."""

    def __init__(self, engine: AsyncEngine, sealer: Sealer) -> None:
        self._engine, self._sealer = engine, sealer

    async def put(self, caller: Identity, name: str, spec: SecretSpec) -> Secret:
        """Set a tenant's secret; ``ProblemError``: 409 without a key to seal with, 403 if the tenant has too many."""
        if not self._sealer.has_key:
            raise no_key()
        tenant_id, project = caller.tenant_id, spec.project or ""
        sealed = self._sealer.seal(spec.value, tenant_id, project, name)
        async with self._engine.begin() as connection:
            repository = SecretRepository(connection)
            found(await AccessRepository(connection).tenant(tenant_id), "tenant")
            await repository.lock_tenant(tenant_id)
            is_new = not await repository.version(tenant_id, project, name)
            if is_new and await repository.count(tenant_id) >= MAX_SECRETS_OF_A_TENANT:
                raise ProblemError(
                    403, ProblemCode.QUOTA_EXCEEDED, f"A tenant may have {MAX_SECRETS_OF_A_TENANT:,} secrets."
                )
            stored = await repository.put(tenant_id, project, name, sealed, utc_now())
            await write_audit(connection, caller, "secret.set", name, project=spec.project, version=stored.version)
        return stored

    async def list(self, caller: Identity) -> SecretList:
        """Return the secrets of the caller's tenant, without values."""
        async with self._engine.connect() as connection:
            return SecretList(items=await SecretRepository(connection).all(caller.tenant_id))

    async def remove(self, caller: Identity, name: str, project: str | None) -> None:
        """Delete a secret; running jobs keep its value; ``ProblemError``: 404 if there is none."""
        async with self._engine.begin() as connection:
            if not await SecretRepository(connection).remove(caller.tenant_id, project or "", name):
                raise not_found("secret")
            await write_audit(connection, caller, "secret.deleted", name, project=project)
