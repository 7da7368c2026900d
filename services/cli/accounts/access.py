"""Commands for who may do what: tenants, keys, audit; and who the caller is."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from services.cli import output
from services.cli.client import Gateway
from services.cli.errors import EXIT_USAGE, CliError
from services.cli.jobs.jobs import AsJson
from services.cli.output import console
from services.cli.values import duration_s, past_time, time_of
from services.contracts.identity import Role

PAGE = 500
MaxGpus = Annotated[str | None, typer.Option(help="Most GPUs held at once; none for no limit.")]
MaxJobs = Annotated[int | None, typer.Option(min=0, help="Most jobs that have not ended.")]
Weight = Annotated[
    float | None, typer.Option(help="Its share of the GPUs against other tenants', under fair+ policies; 1 by default.")
]
Rate = Annotated[float | None, typer.Option(help="Sustained requests per second at the gateway.")]
Expires = Annotated[
    str | None, typer.Option(help="When the key stops working: 90d, 12h, or an ISO 8601 time; by default never.")
]


def register(app: typer.Typer) -> None:
    tenants = typer.Typer(help="Show the tenants, create one, or change its limits.", invoke_without_command=True)
    tenants.callback()(list_tenants)
    tenants.command("create")(create_tenant)
    tenants.command("set")(set_tenant)
    tenants.command("shares")(show_shares)
    app.add_typer(tenants, name="tenants")
    keys = typer.Typer(help="Show the API keys, create, rotate, expire or revoke one.", invoke_without_command=True)
    keys.callback()(list_keys)
    keys.command("create")(create_key)
    keys.command("rotate")(rotate_key)
    keys.command("expire")(expire_key)
    keys.command("revoke")(revoke_key)
    app.add_typer(keys, name="keys")
    app.command()(audit)
    app.command()(whoami)


def list_tenants(context: typer.Context, as_json: AsJson = False) -> None:
    """Show the tenants and their limits."""
    if context.invoked_subcommand:
        return
    found = Gateway().pages("/v1/tenants", PAGE)
    figures = ("active jobs", "GPUs", "weight", "requests/s", "burst")
    shown = output.table("tenant", *figures, "created", right=figures)
    for tenant in found:
        limits = tenant["limits"]
        gpus = "no limit" if limits["max_gpus"] is None else str(limits["max_gpus"])
        weight = f"{limits['share_weight']:g}"
        rates = f"{limits['requests_per_s']:g}", str(limits["burst"])
        shown.add_row(
            tenant["id"], str(limits["max_active_jobs"]), gpus, weight, *rates, output.age(tenant["created_at"])
        )
    output.tell(found, as_json, shown)


def create_tenant(
    tenant: str,
    max_gpus: MaxGpus = None,
    max_jobs: MaxJobs = None,
    requests_per_s: Rate = None,
    weight: Weight = None,
    as_json: AsJson = False,
) -> None:
    """Create a tenant."""
    body = {"id": tenant, "limits": _limits(max_gpus, max_jobs, requests_per_s, weight)}
    made = Gateway().call("POST", "/v1/tenants", body=body)
    output.tell(made, as_json, f"{tenant} is created; `wattshift keys create --tenant {tenant}` makes a key for it")


def set_tenant(
    tenant: str,
    max_gpus: MaxGpus = None,
    max_jobs: MaxJobs = None,
    requests_per_s: Rate = None,
    weight: Weight = None,
    as_json: AsJson = False,
) -> None:
    """Change a tenant's limits; those not given stay as they are."""
    limits = _limits(max_gpus, max_jobs, requests_per_s, weight)
    if not limits:
        raise CliError("give a limit: --max-gpus, --max-jobs, --requests-per-s or --weight", EXIT_USAGE)
    changed = Gateway().call("PATCH", f"/v1/tenants/{tenant}", body={"limits": limits})
    output.tell(changed, as_json, f"the limits of {tenant} are changed")


def show_shares(as_json: AsJson = False) -> None:
    """Show each tenant's share of the GPUs, what it holds and has used, and how evenly they are shared."""
    found = Gateway().get("/v1/shares")
    if as_json:
        output.print_json(found)
        return
    figures = ("weight", "share", "GPUs", "waiting jobs", "used GPU h")
    shown = output.table("tenant", *figures, right=figures)
    for tenant in found["items"]:
        used = tenant["used_gpu_hours"]
        shown.add_row(
            tenant["tenant_id"],
            f"{tenant['weight']:g}",
            f"{100 * tenant['share']:.1f} %",
            str(tenant["gpus"]),
            str(tenant["waiting_jobs"]),
            "-" if used is None else f"{used:.1f}",
        )
    console.print(shown)
    if not found["active"]:
        console.print(f"the policy {found['policy']} does not share between tenants", soft_wrap=True)
    if found["jain"] is not None:
        console.print(f"Jain's index of the tenants that wait: {found['jain']:.3f}")


def _limits(
    max_gpus: str | None, max_jobs: int | None, requests_per_s: float | None, weight: float | None
) -> dict[str, Any]:
    if max_gpus is not None and max_gpus != "none" and not max_gpus.isdigit():
        raise CliError(f"--max-gpus {max_gpus}: must be a whole number, or none", EXIT_USAGE)
    gpus = {} if max_gpus is None else {"max_gpus": None if max_gpus == "none" else int(max_gpus)}
    others = {"max_active_jobs": max_jobs, "requests_per_s": requests_per_s, "share_weight": weight}
    return {**gpus, **{name: value for name, value in others.items() if value is not None}}


def list_keys(
    context: typer.Context,
    every: Annotated[bool, typer.Option("--all", help="Also keys that were revoked or have expired.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the API keys, newest first, and when each was last used."""
    if context.invoked_subcommand:
        return
    found = [key for key in Gateway().pages("/v1/keys", PAGE) if every or key_state(key) == "valid"]
    words = ("user", "role", "project", "label", "state")
    shown = output.table("key", "tenant", *words, "created", "last used", "expires")
    for key in found:
        used = f"{output.age(key['last_used_at'])} ago" if key["last_used_at"] else "never"
        expires = (key["expires_at"] or "never")[:16].replace("T", " ")
        created = f"{output.age(key['created_at'])} ago"
        role = key["role"].replace("_", "-")
        cells = key["user"] or "-", role, key["project"] or "-", key["label"] or "-", key_state(key)
        shown.add_row(key["id"], key["tenant_id"], *cells, created, used, expires)
    output.tell(found, as_json, shown)


def key_state(key: dict[str, Any]) -> str:
    """Return whether a key is valid, expired or revoked."""
    if key["revoked_at"]:
        return "revoked"
    expires = output.instant(key["expires_at"])
    return "expired" if expires and expires <= datetime.now(UTC) else "valid"


def create_key(
    tenant: Annotated[str, typer.Option(help="Whose key it is.")] = "default",
    role: Annotated[str, typer.Option(help="admin, operator, user or read-only.")] = "user",
    user: Annotated[str | None, typer.Option(help="The user of the tenant whose key it is.")] = None,
    project: Annotated[
        str | None, typer.Option(help="The only project whose jobs, reports and budgets it reaches.")
    ] = None,
    label: Annotated[str, typer.Option(help="What or whom it is for.")] = "",
    expires: Expires = None,
    as_json: AsJson = False,
) -> None:
    """Create an API key; it is shown this once."""
    known = {name.value.replace("_", "-"): name.value for name in Role}
    if role not in known:
        raise CliError(f"--role {role}: must be one of {', '.join(known)}", EXIT_USAGE)
    body = {"tenant_id": tenant, "role": known[role], "label": label, "expires_at": _expiry(expires)}
    body |= {name: value for name, value in (("user", user), ("project", project)) if value is not None}
    _print_secret(Gateway().call("POST", "/v1/keys", body=body), as_json)


def rotate_key(
    key: str,
    overlap: Annotated[str, typer.Option(help="How long the old key still works, such as 1h.")] = "0",
    expires: Expires = None,
    as_json: AsJson = False,
) -> None:
    """Replace a key with a new one of the same tenant, user, role, project and label; it is shown this once."""
    body = {"overlap_s": duration_s(overlap, "--overlap"), "expires_at": _expiry(expires)}
    _print_secret(Gateway().call("POST", f"/v1/keys/{key}/rotate", body=body), as_json)


def expire_key(
    key: str,
    expires: Annotated[str, typer.Argument(help="90d, 12h, an ISO 8601 time, or never.")],
    as_json: AsJson = False,
) -> None:
    """Set when a key stops working."""
    at = None if expires == "never" else _expiry(expires)
    changed = Gateway().call("PATCH", f"/v1/keys/{key}", body={"expires_at": at})
    output.tell(changed, as_json, f"{key} works " + (f"until {at}" if at else "until it is revoked"))


def revoke_key(key: str) -> None:
    """Revoke a key; it stops working within a few seconds."""
    Gateway().call("DELETE", f"/v1/keys/{key}")
    console.print(f"{key} is revoked")


def _expiry(text: str | None) -> str | None:
    if text is None:
        return None
    now = datetime.now(UTC)
    is_time = text[:4].isdigit() and "-" in text
    at = time_of(text, "--expires", now) if is_time else now + timedelta(seconds=duration_s(text, "--expires"))
    if at <= now:
        raise CliError(f"--expires {text}: must be in the future; `wattshift keys revoke` ends a key now", EXIT_USAGE)
    return at.isoformat(timespec="seconds")


def _print_secret(key: dict[str, Any], as_json: bool) -> None:
    if as_json:
        output.print_json(key)
        return
    until = f", works until {key['expires_at']}" if key["expires_at"] else ""
    console.print(f"{key['id']}  {_whose(key)}{until}", soft_wrap=True)
    console.print(f"the key, shown this once: {key['secret']}", soft_wrap=True)


def whoami(as_json: AsJson = False) -> None:
    """Show whose API key is in use, and what it may do."""
    me = Gateway().get("/v1/whoami")
    runs_as = f"; jobs run as the account {me['account']}" if me["account"] else ""
    output.tell(me, as_json, f"{me['key_id']}  {_whose(me)}{runs_as}")


def _whose(key: dict[str, Any]) -> str:
    """Return a key's role, user, tenant and project in words."""
    user = f" {key['user']}," if key["user"] else ""
    project = f", limited to the project {key['project']}" if key["project"] else ""
    return f"{key['role'].replace('_', '-')} key of{user} tenant {key['tenant_id']}{project}"


def audit(
    since: Annotated[str | None, typer.Option(help="Only entries since then: 2d, 6h, or an ISO 8601 time.")] = None,
    until: Annotated[str | None, typer.Option(help="Only entries before then.")] = None,
    action: Annotated[str | None, typer.Option(help="Beginning of the action, such as key. or node.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what operators and admins did, newest first."""
    given = {"since": since, "until": until}
    params = {name: past_time(text, f"--{name}").isoformat() for name, text in given.items() if text}
    found = Gateway().pages("/v1/audit", PAGE, action=action, **params)
    shown = output.table("at", "tenant", "key", "action", "target", "details")
    for entry in found:
        details = ", ".join(f"{name} {value}" for name, value in entry["data"].items())
        at = entry["at"][:19].replace("T", " ")
        shown.add_row(at, entry["tenant_id"] or "-", entry["key_id"] or "-", entry["action"], entry["target"], details)
    output.tell(found, as_json, shown if found else "no entries")
