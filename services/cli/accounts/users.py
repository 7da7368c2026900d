"""Commands for users: who submits jobs, and which account those jobs run as."""

from typing import Annotated, Any

import typer

from services.cli import output
from services.cli.client import Gateway
from services.cli.commands import EXIT_USAGE, AsJson, CliError, Group
from services.cli.output import console
from services.contracts.codes import ProblemCode

PAGE = 500
MOST_KEYS = 10_000
Tenant = Annotated[str, typer.Option(help="Whose user it is.")]
Account = Annotated[
    str | None,
    typer.Option(help="Account of the operating system that the user's jobs run as on nodes; none for the agent's."),
]


def register(app: typer.Typer) -> None:
    words = "Show a tenant's users, create one, or change, disable or enable one."
    users = Group(app, "users", words, list_users)
    users.add(list_users, create_user, show_user, set_user, disable_user, enable_user)


def list_users(tenant: Tenant = "default", as_json: AsJson = False) -> None:
    """Show a tenant's users."""
    found = Gateway().pages(f"/v1/tenants/{tenant}/users", PAGE)
    shown = output.table("user", "account", "state", "created")
    for user in found:
        created = f"{output.age(user['created_at'])} ago"
        shown.add_row(user["name"], user["account"] or "-", _state(user), created)
    output.tell(found, as_json, shown if found else f"tenant {tenant} has no users")


def create_user(user: str, tenant: Tenant = "default", account: Account = None, as_json: AsJson = False) -> None:
    """Create a user of a tenant."""
    body = {"name": user, "account": _account(account)}
    made = Gateway().call("POST", f"/v1/tenants/{tenant}/users", body=body)
    then = f"wattshift keys create --tenant {tenant} --user {user}"
    output.tell(made, as_json, f"{user} is created; `{then}` makes a key for them")


def show_user(user: str, tenant: Tenant = "default", as_json: AsJson = False) -> None:
    """Show a user and their keys."""
    gateway = Gateway()
    found = gateway.get(f"/v1/tenants/{tenant}/users/{user}")
    keys = [key for key in _keys(gateway) if (key["tenant_id"], key["user"]) == (tenant, found["name"])]
    if as_json:
        return output.print_json({**found, "keys": keys})
    account = found["account"] or "that of the agent"
    console.print(f"{user} of tenant {tenant} is {_state(found)}; jobs run as the account: {account}")
    for key in keys:
        project = f", project {key['project']}" if key["project"] else ""
        console.print(f"{key['id']}  {key['role'].replace('_', '-')}{project}  {key['label']}")


def set_user(user: str, tenant: Tenant = "default", account: Account = None, as_json: AsJson = False) -> None:
    """Change the account that a user's jobs run as; it applies to jobs that start from now on."""
    if account is None:
        raise CliError("give --account NAME, or --account none for the agent's own", EXIT_USAGE)
    words = f"jobs of {user} run as " + (account if _account(account) else "the agent's account")
    output.tell(_change(tenant, user, account=_account(account)), as_json, words)


def disable_user(user: str, tenant: Tenant = "default", as_json: AsJson = False) -> None:
    """Disable a user: their keys stop working within a few seconds; jobs already accepted continue."""
    output.tell(_change(tenant, user, disabled=True), as_json, f"{user} is disabled")


def enable_user(user: str, tenant: Tenant = "default", as_json: AsJson = False) -> None:
    """Enable a disabled user: their keys work again."""
    output.tell(_change(tenant, user, disabled=False), as_json, f"{user} is enabled")


def _keys(gateway: Gateway) -> list[Any]:
    """Return all keys; none if the caller is not an admin, as only admins see them."""
    try:
        return gateway.pages("/v1/keys", MOST_KEYS)
    except CliError as error:
        if error.code == ProblemCode.FORBIDDEN:
            return []
        raise


def _change(tenant: str, user: str, **change: Any) -> Any:
    return Gateway().call("PATCH", f"/v1/tenants/{tenant}/users/{user}", body=change)


def _account(text: str | None) -> str | None:
    return None if text == "none" else text


def _state(user: dict[str, Any]) -> str:
    return "disabled" if user["disabled_at"] else "enabled"
