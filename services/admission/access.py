"""Use cases on tenants, their users, keys and the audit log."""

from datetime import timedelta
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from services.admission.keys import key_hash, new_secret
from services.admission.repository.access import AccessRepository, write_audit
from services.contracts import identity
from services.contracts.identity import Identity, OwnIdentity, Role, User, UserChange, UserList, UserSpec
from services.contracts.invalid import NAME_PATTERN
from services.contracts.problems import FieldError
from services.contracts.queries import AuditQuery, PageQuery
from services.kit.ids import utc_now
from services.kit.problems import conflict, found, invalid
from services.kit.routes import one_page, read_cursor

KEY_ID = r"key_[0-9a-z]{26}"
SUPERUSER = "root"
"""No job runs as this account. Users of an earlier release who have it run jobs as their tenant's account."""


class Access:
    """Manages tenants, their users and keys, and reads the audit log."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def resolve(self, key: bytes | str) -> identity.ResolvedKey:
        """Return the identity of the key with this hash or id; ``ProblemError``: 404 if none works."""
        async with self._engine.begin() as connection:
            return found(await AccessRepository(connection).resolve(key), "key")

    async def create_tenant(self, caller: identity.Identity, spec: identity.TenantSpec) -> identity.Tenant:
        _check(spec.limits)
        async with self._engine.begin() as connection:
            tenant = await AccessRepository(connection).insert_tenant(spec)
            if tenant is None:
                raise conflict(
                    f"There is a tenant {spec.id} already.",
                    errors=[FieldError(pointer="/id", detail="Taken.")],
                )
            await write_audit(connection, caller, "tenant.created", spec.id, limits=spec.limits.model_dump())
        return tenant

    async def change_tenant(
        self, caller: identity.Identity, tenant_id: str, change: identity.TenantChange
    ) -> identity.Tenant:
        """Change a tenant's limits; they apply in the gateway once its cached keys have expired."""
        async with self._engine.begin() as connection:
            repository = AccessRepository(connection)
            tenant = found(await repository.tenant(tenant_id, lock=True), "tenant")
            limits = change.limits.applied_to(tenant.limits)
            if change.limits.model_fields_set & {"guaranteed_gpus", "max_gpus"}:  # others may change as ever
                _check(limits)
            await repository.set_limits(tenant_id, limits)
            before, after = tenant.limits.model_dump(), limits.model_dump()
            await write_audit(connection, caller, "tenant.changed", tenant_id, before=before, after=after)
        return tenant.model_copy(update={"limits": limits})

    async def tenant(self, tenant_id: str) -> identity.Tenant:
        async with self._engine.connect() as connection:
            return found(await AccessRepository(connection).tenant(tenant_id), "tenant")

    async def tenants(self, page: PageQuery) -> identity.TenantList:
        """Return one page of tenants, ordered by id."""
        after_id = read_cursor(page.cursor, NAME_PATTERN)
        async with self._engine.connect() as connection:
            listed = await AccessRepository(connection).tenants(after_id, page.limit + 1)
        items, following = one_page(listed, page.limit, lambda tenant: tenant.id)
        return identity.TenantList(items=items, next_cursor=following)

    async def create_key(self, caller: identity.Identity, spec: identity.KeySpec) -> identity.NewApiKey:
        """Create a key; only this answer contains its secret."""
        secret = new_secret()
        async with self._engine.begin() as connection:
            repository = AccessRepository(connection)
            if await repository.tenant(spec.tenant_id) is None:
                raise invalid("/tenant_id", f"There is no tenant {spec.tenant_id}.")
            if spec.project is not None and spec.role.is_operators:
                raise invalid("/project", f"A key of the role {spec.role} is of the whole cluster and of no project.")
            user = await self._owner(repository, spec)
            key = await repository.insert_key(spec, key_hash(secret), user.id if user else None)
            details = spec.model_dump(
                mode="json", include={"expires_at", "user", "project", "limits"}, exclude_none=True
            )
            details = {name: value for name, value in details.items() if value}
            await write_audit(
                connection, caller, "key.created", key.id, tenant=spec.tenant_id, role=spec.role, **details
            )
        return identity.NewApiKey.of(key, secret=secret)

    @staticmethod
    async def _owner(repository: AccessRepository, spec: identity.KeySpec) -> identity.User | None:
        """Return the user that a new key names, locked until the transaction ends."""
        if spec.user is None:
            return None
        user = await repository.user(spec.tenant_id, spec.user, lock=True)
        if user is None:
            raise invalid("/user", f"Tenant {spec.tenant_id} has no user {spec.user}.")
        if user.disabled_at is not None:
            raise invalid("/user", f"User {spec.user} is disabled.")
        return user

    async def rotate_key(
        self, caller: identity.Identity, key_id: str, rotation: identity.KeyRotation
    ) -> identity.NewApiKey:
        """Replace a key with a new one of the same tenant, user, role, project, label and limits.

        The old one keeps working for ``overlap_s``.

        Raises:
            ProblemError: 404 if there is no such key; 409 if it no longer works, or if every admin key would expire.
        """
        secret = new_secret()
        async with self._engine.begin() as connection:
            repository = AccessRepository(connection)
            await repository.lock_admin_keys()
            old = await self._working_key(repository, key_id)
            if rotation.expires_at is not None:
                await self._check_lasting(repository, old)
            same = old.model_dump(include={"tenant_id", "role", "label", "user", "project", "limits"})
            spec = identity.KeySpec(**same, expires_at=rotation.expires_at)
            user = await self._owner(repository, spec)
            key = await repository.insert_key(spec, key_hash(secret), user.id if user else None, replaced=key_id)
            ends_at = utc_now() + timedelta(seconds=rotation.overlap_s)
            await repository.change_key(key_id, expires_at=min(ends_at, old.expires_at or ends_at))
            await write_audit(connection, caller, "key.rotated", key_id, successor=key.id, overlap_s=rotation.overlap_s)
        return identity.NewApiKey.of(key, secret=secret)

    async def change_key(self, caller: identity.Identity, key_id: str, change: identity.KeyChange) -> identity.ApiKey:
        """Set when a key stops working, and what it may do with models.

        Raises:
            ProblemError: 404 if there is no such key; 409 if it no longer works, or if every other admin key expires.
        """
        async with self._engine.begin() as connection:
            repository = AccessRepository(connection)
            await repository.lock_admin_keys()
            key = await self._working_key(repository, key_id)
            if change.expires_at is not None:
                await self._check_lasting(repository, key)
            changed: dict[str, Any] = {}
            if "expires_at" in change.model_fields_set:
                changed["expires_at"] = change.expires_at
                await repository.change_key(key_id, expires_at=change.expires_at)
                shown = change.expires_at.isoformat() if change.expires_at else None
                await write_audit(connection, caller, "key.expiry_set", key_id, expires_at=shown)
            if change.limits is not None:
                changed["limits"] = limits = key.limits.changed(change.limits)
                await repository.change_key(key_id, limits=limits.model_dump(exclude_none=True))
                before, after = (each.model_dump(exclude_none=True) for each in (key.limits, limits))
                await write_audit(connection, caller, "key.limits_set", key_id, before=before, after=after)
        return key.model_copy(update=changed)

    @staticmethod
    async def _working_key(repository: AccessRepository, key_id: str) -> identity.ApiKey:
        key = found(await repository.key(key_id), "key")
        if not _works(key):
            raise conflict("The key was revoked or has expired; create a new one.")
        return key

    @staticmethod
    async def _check_lasting(repository: AccessRepository, key: identity.ApiKey) -> None:
        """Refuse to let a key expire if no other admin key would last."""
        others = (other for other in await repository.admins() if other.expires_at is None and other.id != key.id)
        if key.role is Role.ADMIN and not any(others):
            raise conflict("No other admin key would last; create one that does not expire.")

    async def revoke_key(self, caller: identity.Identity, key_id: str) -> None:
        """Revoke a key, once; ``ProblemError``: 404 if there is no such key, 409 for the last admin key."""
        async with self._engine.begin() as connection:
            repository = AccessRepository(connection)
            await repository.lock_admin_keys()
            key = found(await repository.key(key_id), "key")
            if not _works(key):
                return
            if key.role is Role.ADMIN and all(other.id == key_id for other in await repository.admins()):
                raise conflict("This is the last admin key; create another one first.")
            await repository.change_key(key_id, revoked_at=utc_now())
            await write_audit(connection, caller, "key.revoked", key_id)

    async def keys(self, page: PageQuery) -> identity.KeyList:
        """Return one page of keys, newest first, without their secrets."""
        before_id = read_cursor(page.cursor, KEY_ID)
        async with self._engine.connect() as connection:
            listed = await AccessRepository(connection).keys(before_id, page.limit + 1)
        items, following = one_page(listed, page.limit, lambda key: key.id)
        return identity.KeyList(items=items, next_cursor=following)

    async def audit(self, page: AuditQuery) -> identity.AuditList:
        """Return one page of the audit log, newest first."""
        before = read_cursor(page.cursor, r"[0-9]{1,18}")
        async with self._engine.connect() as connection:
            after = None if before is None else int(before)
            listed = await AccessRepository(connection).audit(page, after, page.limit + 1)
        rows, following = one_page(listed, page.limit, lambda row: str(row[0]))
        return identity.AuditList(items=[entry for _, entry in rows], next_cursor=following)

    async def create_user(self, caller: Identity, tenant_id: str, spec: UserSpec) -> User:
        """Create a user of a tenant; ``ProblemError``: 404 without it, 409 for a name in use, 422 for root's jobs."""
        async with self._engine.begin() as connection:
            repository = AccessRepository(connection)
            found(await repository.tenant(tenant_id), "tenant")
            _check_account(spec.account)
            user = await repository.insert_user(tenant_id, spec)
            if user is None:
                taken = FieldError(pointer="/name", detail="Taken.")
                detail = f"Tenant {tenant_id} has a user {spec.name} already."
                raise conflict(detail, errors=[taken])
            await write_audit(
                connection, caller, "user.created", user.id, tenant=tenant_id, name=spec.name, account=spec.account
            )
        return user

    async def change_user(self, caller: Identity, tenant_id: str, name: str, change: UserChange) -> User:
        """Change a user's account, or disable or enable the user; keys of a disabled user are refused.

        Raises:
            ProblemError: 404 if there is no such user; 409 if no admin key would be left; 422 if its jobs would run as
                root.
        """
        given = change.model_fields_set
        async with self._engine.begin() as connection:
            repository = AccessRepository(connection)
            await repository.lock_admin_keys()
            changed = user = found(await repository.user(tenant_id, name, lock=True), "user")
            if "account" in given and change.account != user.account:
                _check_account(change.account)
                changed = changed.model_copy(update={"account": change.account})
            if "disabled" in given and change.disabled != (user.disabled_at is not None):
                if change.disabled:
                    await self._check_admins(repository, user)
                changed = changed.model_copy(update={"disabled_at": utc_now() if change.disabled else None})
            if changed != user:
                await repository.change_user(user.id, account=changed.account, disabled_at=changed.disabled_at)
                before, after = (
                    {"account": each.account, "disabled": each.disabled_at is not None} for each in (user, changed)
                )
                await write_audit(connection, caller, "user.changed", user.id, name=name, before=before, after=after)
        return changed

    @staticmethod
    async def _check_admins(repository: AccessRepository, user: User) -> None:
        admins = await repository.admins()
        if admins and all((key.tenant_id, key.user) == (user.tenant_id, user.name) for key in admins):
            raise conflict("This user has the last admin key; create another one first.")

    async def user(self, tenant_id: str, name: str) -> User:
        """Return a user; ``ProblemError``: 404 if there is none."""
        async with self._engine.connect() as connection:
            return found(await AccessRepository(connection).user(tenant_id, name), "user")

    async def users(self, tenant_id: str, page: PageQuery) -> UserList:
        """Return one page of a tenant's users, by name; ``ProblemError``: 404 if there is no such tenant."""
        after = read_cursor(page.cursor, NAME_PATTERN)
        async with self._engine.connect() as connection:
            repository = AccessRepository(connection)
            found(await repository.tenant(tenant_id), "tenant")
            listed = await repository.users(tenant_id, after, page.limit + 1)
        items, following = one_page(listed, page.limit, lambda user: user.name)
        return UserList(items=items, next_cursor=following)

    async def own(self, caller: Identity) -> OwnIdentity:
        async with self._engine.connect() as connection:
            repository = AccessRepository(connection)
            user = None if caller.user_id is None else await repository.user_of_id(caller.user_id)
            installation = await repository.installation()
        named = {"user": user and user.name, "account": user and user.account, "installation": installation}
        return OwnIdentity.of(caller, **named)


def _works(key: identity.ApiKey) -> bool:
    return key.revoked_at is None and (key.expires_at is None or key.expires_at > utc_now())


def _check(limits: identity.TenantLimits) -> None:
    if limits.max_gpus is not None and limits.guaranteed_gpus > limits.max_gpus:
        raise invalid(
            "/limits/guaranteed_gpus", f"A tenant is guaranteed at most its max_gpus, which are {limits.max_gpus}."
        )


def _check_account(account: str | None) -> None:
    if account == SUPERUSER:
        detail = f"No job runs as {SUPERUSER}: choose an ordinary account, or none for that of the tenant."
        raise invalid("/account", detail)
