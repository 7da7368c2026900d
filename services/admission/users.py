"""Use cases on users: who submits jobs, with which keys, and under which account they run."""

from sqlalchemy.ext.asyncio import AsyncEngine

from services.admission.repository.access import AccessRepository, write_audit
from services.contracts.identity import Identity, OwnIdentity, User, UserChange, UserList, UserSpec
from services.contracts.invalid import NAME_PATTERN
from services.contracts.problems import FieldError
from services.contracts.queries import PageQuery
from services.kit.cursors import one_page, read_cursor
from services.kit.ids import utc_now
from services.kit.problems import conflict, invalid, not_found

SUPERUSER = "root"
"""No job runs as this account. Users of an earlier release who have it run jobs as their tenant's account."""


class Users:
    """Manages the users of tenants."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def create(self, caller: Identity, tenant_id: str, spec: UserSpec) -> User:
        """Create a user of a tenant.

        Raises:
            ProblemError: 404 if there is no such tenant, 409 if it has a user of that name, 422 if its jobs would run
                as root.
        """
        async with self._engine.begin() as connection:
            repository = AccessRepository(connection)
            if await repository.tenant(tenant_id) is None:
                raise not_found("tenant")
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

    async def change(self, caller: Identity, tenant_id: str, name: str, change: UserChange) -> User:
        """Change a user's account, or disable or enable the user; keys of a disabled user are refused.

        Raises:
            ProblemError: 404 if there is no such user; 409 if no admin key would be left; 422 if its jobs would run as
                root.
        """
        given = change.model_fields_set
        async with self._engine.begin() as connection:
            repository = AccessRepository(connection)
            await repository.lock_admin_keys()
            user = await repository.user(tenant_id, name, lock=True)
            if user is None:
                raise not_found("user")
            changed = user
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
        owners = [owner for _, owner in await repository.admin_keys()]
        if user.id in owners and all(owner == user.id for owner in owners):
            raise conflict("This user has the last admin key; create another one first.")

    async def get(self, tenant_id: str, name: str) -> User:
        """Return a user; ``ProblemError``: 404 if there is none."""
        async with self._engine.connect() as connection:
            user = await AccessRepository(connection).user(tenant_id, name)
        if user is None:
            raise not_found("user")
        return user

    async def page(self, tenant_id: str, page: PageQuery) -> UserList:
        """Return one page of a tenant's users, by name; ``ProblemError``: 404 if there is no such tenant."""
        after = read_cursor(page.cursor, NAME_PATTERN)
        async with self._engine.connect() as connection:
            repository = AccessRepository(connection)
            if await repository.tenant(tenant_id) is None:
                raise not_found("tenant")
            found = await repository.users(tenant_id, after, page.limit + 1)
        items, following = one_page(found, page.limit, lambda user: user.name)
        return UserList(items=items, next_cursor=following)

    async def own(self, caller: Identity) -> OwnIdentity:
        user = None
        if caller.user_id is not None:
            async with self._engine.connect() as connection:
                user = await AccessRepository(connection).user_of_id(caller.user_id)
        return OwnIdentity(
            tenant_id=caller.tenant_id,
            role=caller.role,
            key_id=caller.key_id,
            project=caller.project,
            user=user.name if user else None,
            account=user.account if user else None,
        )


def _check_account(account: str | None) -> None:
    if account == SUPERUSER:
        detail = f"No job runs as {SUPERUSER}: choose an ordinary account, or none for that of the tenant."
        raise invalid("/account", detail)
