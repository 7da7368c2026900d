"""Commands for who may do what: tenants, users, keys, audit; and who the caller is."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from services.cli import output
from services.cli.client import Gateway
from services.cli.commands import EXIT_USAGE, AsJson, CliError, Group, with_records
from services.cli.output import console
from services.cli.values import duration_s, once, past_time, time_of, words_of
from services.contracts.codes import ProblemCode
from services.contracts.identity import Role
from services.kit.text import decimal

MOST_ENTRIES = 500  #: Of the audit log, at once
FIGURES = {
    **dict.fromkeys(("requests_per_min", "tokens_per_min", "month_tokens", "priority"), int),
    **dict.fromkeys(("month_gco2", "month_cost", "least_accuracy_pct"), float),
}
Expires = Annotated[
    str | None, typer.Option(help="When the key stops working: 90d, 12h, or an ISO 8601 time; by default never.")
]


def register(app: typer.Typer) -> None:
    tenants = Group(app, "tenants", "Show the tenants, create one, or change its limits.", list_tenants)
    tenants.add(create_tenant, set_tenant, shares)
    keys = Group(app, "keys", "Show the API keys, create, change, rotate, expire or revoke one.", list_keys)
    keys.add(create_key, set_key, rotate_key, expire_key, revoke_key)
    words = "Show a tenant's users, create one, or change, disable or enable one."
    users = Group(app, "users", words, list_users)
    users.add(list_users, create_user, show_user, set_user, disable_user, enable_user)
    app.command()(audit)
    app.command()(whoami)


def list_tenants(as_json: AsJson = False) -> None:
    """Show the tenants: what each is guaranteed, holds and borrows of the GPUs, and its limits."""
    gateway = Gateway()
    used = {each["tenant_id"]: each for each in gateway.get("/v1/shares")["items"]}
    found = gateway.pages("/v1/tenants")
    figures = (">guaranteed", ">used", ">borrowed", ">GPUs", ">active jobs", ">weight", ">requests/s", ">burst")
    shown = output.table("tenant", *figures, "created")
    for tenant in found:
        limits = tenant["limits"]
        gpus = "no limit" if limits["max_gpus"] is None else str(limits["max_gpus"])
        weight = f"{limits['share_weight']:g}"
        rates = f"{limits['requests_per_s']:g}", str(limits["burst"])
        tenant |= {name: used.get(tenant["id"], {}).get(name, 0) for name in ("gpus", "borrowed_gpus")}
        held = str(limits["guaranteed_gpus"]), str(tenant["gpus"]), str(tenant["borrowed_gpus"])
        others = gpus, str(limits["max_active_jobs"]), weight, *rates
        shown.add_row(tenant["id"], *held, *others, output.age(tenant["created_at"]))
    output.tell(found, as_json, shown)


@dataclass
class TenantLimits:
    """Limits of a tenant as typed; None is not given."""

    guaranteed_gpus: Annotated[int | None, typer.Option(min=0, help="GPUs that it is guaranteed; 0 by default.")] = None
    max_gpus: Annotated[str | None, typer.Option(help="Most GPUs held at once; none for no limit.")] = None
    max_jobs: Annotated[int | None, typer.Option(min=0, help="Most jobs that have not ended.")] = None
    requests_per_s: Annotated[float | None, typer.Option(help="Sustained requests per second at the gateway.")] = None
    weight: Annotated[
        float | None,
        typer.Option(help="Its share of the GPUs against other tenants', under fair+ policies; 1 by default."),
    ] = None
    flex: Annotated[
        str | None, typer.Option(help="How much slower orders of the grid may make its jobs, per cent; none for 25.")
    ] = None

    def given(self) -> dict[str, Any]:
        """Return those that were given; ``none`` removes one."""
        if self.max_gpus not in (None, "none") and not self.max_gpus.isdecimal():
            raise CliError(f"--max-gpus {self.max_gpus}: must be a whole number, or none", EXIT_USAGE)
        if self.flex not in (None, "none", "0", "10", "25", "50"):
            raise CliError(f"--flex {self.flex}: must be 0, 10, 25, 50 or none", EXIT_USAGE)
        whole = {"max_gpus": self.max_gpus, "flex": self.flex}
        found = {name: None if text == "none" else int(text) for name, text in whole.items() if text is not None}
        others = {"guaranteed_gpus": self.guaranteed_gpus, "max_active_jobs": self.max_jobs}
        others |= {"requests_per_s": self.requests_per_s, "share_weight": self.weight}
        return found | {name: value for name, value in others.items() if value is not None}


@with_records
def create_tenant(tenant: str, limits: TenantLimits, as_json: AsJson = False) -> None:
    """Create a tenant."""
    made = Gateway().call("POST", "/v1/tenants", body={"id": tenant, "limits": limits.given()})
    output.tell(made, as_json, f"{tenant} is created; `wattshift keys create --tenant {tenant}` makes a key for it")


@with_records
def set_tenant(tenant: str, limits: TenantLimits, as_json: AsJson = False) -> None:
    """Change a tenant's limits; those not given stay as they are."""
    if not (given := limits.given()):
        options = "--max-gpus, --guaranteed-gpus, --max-jobs, --requests-per-s, --weight or --flex"
        raise CliError(f"give a limit: {options}", EXIT_USAGE)
    changed = Gateway().call("PATCH", f"/v1/tenants/{tenant}", body={"limits": given})
    output.tell(changed, as_json, f"the limits of {tenant} are changed")


def shares(as_json: AsJson = False) -> None:
    """Show each tenant's share of the GPUs, what it holds and has used, and how evenly they are shared."""
    found = Gateway().get("/v1/shares")
    if as_json:
        return output.print_json(found)
    shown = output.table("tenant", ">weight", ">share", ">GPUs", ">waiting jobs", ">used GPU h")
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
        console.print(f"the policy {found['policy']} does not share between tenants")
    if found["jain"] is not None:
        console.print(f"Jain's index of the tenants that wait: {found['jain']:.3f}")


def list_keys(
    every: Annotated[bool, typer.Option("--all", help="Also keys that were revoked or have expired.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the API keys, newest first, and when each was last used."""
    found = [key for key in Gateway().pages("/v1/keys") if every or key_state(key) == "valid"]
    words = ("user", "role", "project", "label", "state", "limits")
    shown = output.table("key", "tenant", *words, "created", "last used", "expires")
    for key in found:
        used = f"{output.age(key['last_used_at'])} ago" if key["last_used_at"] else "never"
        expires = output.clock(key["expires_at"], otherwise="never")
        created = f"{output.age(key['created_at'])} ago"
        role = key["role"].replace("_", "-")
        cells = key["user"] or "-", role, key["project"] or "-", key["label"] or "-", key_state(key)
        cells += (_limits_of(key) or "-",)
        shown.add_row(key["id"], key["tenant_id"], *cells, created, used, expires)
    output.tell(found, as_json, shown)


def key_state(key: dict[str, Any]) -> str:
    """Return whether a key is valid, expired or revoked."""
    if key["revoked_at"]:
        return "revoked"
    expires = output.instant(key["expires_at"])
    return "expired" if expires and expires <= datetime.now(UTC) else "valid"


@dataclass
class KeyLimits:
    """What a key may do with models, as typed; None is not given."""

    models: Annotated[
        str | None, typer.Option(help="The only models that it may name, with commas between them; none for all.")
    ] = None
    alias: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=MODEL, or NAME=MODEL=95,OTHER=5 for shares of its requests; may be repeated; none for no alias."
        ),
    ] = None
    requests_per_min: Annotated[str | None, typer.Option(help="Requests to models a minute; none for no limit.")] = None
    tokens_per_min: Annotated[
        str | None, typer.Option(help="Tokens of prompts and answers a minute; none for no limit.")
    ] = None
    month_tokens: Annotated[
        str | None, typer.Option(help="Budget of tokens for a calendar month; none for no limit.")
    ] = None
    month_gco2: Annotated[str | None, typer.Option(help="Budget of gCO2 for a calendar month; none for no limit.")] = (
        None
    )
    month_cost: Annotated[
        str | None, typer.Option(help="Budget of money for a calendar month, by the models' prices; none for no limit.")
    ] = None
    least_accuracy: Annotated[
        str | None,
        typer.Option(help="Per cent that variants of models that answer it have at least; none for no floor."),
    ] = None
    priority: Annotated[
        str | None, typer.Option(help="The most urgent (smallest) priority that its requests may state; none for none.")
    ] = None

    def given(self) -> dict[str, Any]:
        """Return those that were given; ``none`` removes one."""
        found: dict[str, Any] = {}
        if self.models is not None:
            found["models"] = None if self.models == "none" else words_of(self.models, "--models")
        if self.alias:
            aliases = [] if self.alias == ["none"] else [_alias(text) for text in self.alias]
            once((name for name, _ in aliases), "--alias", " ".join(self.alias))
            found["aliases"] = dict(aliases) or None
        for name, kind in FIGURES.items():
            if (text := getattr(self, name.removesuffix("_pct"))) is None:
                continue
            try:
                found[name] = None if text == "none" else kind(text)
            except ValueError:
                option = "--" + name.removesuffix("_pct").replace("_", "-")
                raise CliError(f"{option} {text}: must be a number, or none", EXIT_USAGE) from None
        return found


@with_records
def create_key(
    tenant: Annotated[str, typer.Option(help="Whose key it is.")] = "default",
    role: Annotated[str, typer.Option(help="admin, operator, user, read-only or grid.")] = "user",
    user: Annotated[str | None, typer.Option(help="The user of the tenant whose key it is.")] = None,
    project: Annotated[
        str | None, typer.Option(help="The only project whose jobs, reports and budgets it reaches.")
    ] = None,
    label: Annotated[str, typer.Option(help="What or whom it is for.")] = "",
    expires: Expires = None,
    *,
    limits: KeyLimits,
    as_json: AsJson = False,
) -> None:
    """Create an API key; it is shown this once."""
    known = {name.value.replace("_", "-"): name.value for name in Role}
    if role not in known:
        raise CliError(f"--role {role}: must be one of {', '.join(known)}", EXIT_USAGE)
    body = {"tenant_id": tenant, "role": known[role], "label": label, "expires_at": _expiry(expires)}
    body |= {name: value for name, value in (("user", user), ("project", project)) if value is not None}
    if given := limits.given():
        body["limits"] = given
    _print_secret(Gateway().call("POST", "/v1/keys", body=body), as_json)


@with_records
def set_key(key: str, limits: KeyLimits, as_json: AsJson = False) -> None:
    """Change what a key may do with models; what is not given stays as it is."""
    if not (given := limits.given()):
        raise CliError(
            "give a limit: --models, --alias, --requests-per-min, --month-gco2, ... (see --help)", EXIT_USAGE
        )
    changed = Gateway().call("PATCH", f"/v1/keys/{key}", body={"limits": given})
    output.tell(changed, as_json, f"{key}: {_limits_of(changed) or 'not limited'}")


def _alias(text: str) -> tuple[str, dict[str, float]]:
    name, _, targets = text.partition("=")
    parts = [target.strip().partition("=") for target in targets.split(",")]
    try:
        shares = {model: decimal(share or "1") for model, _, share in parts}
    except ValueError:
        shares = {"": 0.0}
    if not name or "" in shares:
        raise CliError(f"--alias {text}: must be NAME=MODEL, or NAME=MODEL=SHARE,MODEL=SHARE", EXIT_USAGE)
    once((model for model, *_ in parts), "--alias", text)
    return name, shares


def _limits_of(key: dict[str, Any]) -> str:
    """Return what a key may do with models in a few words, and how much of its budgets it has used."""
    limits, used = key["limits"], key["used"] or {}
    words = [f"models {', '.join(limits['models']) or 'none'}"] if limits["models"] is not None else []
    for alias, targets in (limits["aliases"] or {}).items():
        shares = [f"{model}={share:g}" for model, share in targets.items()] if len(targets) > 1 else targets
        words.append(f"{alias} = {', '.join(shares)}")
    for name, unit in (("requests_per_min", "requests/min"), ("tokens_per_min", "tokens/min")):
        words += [f"{limits[name]} {unit}"] if limits[name] is not None else []
    for name, unit in (("tokens", "tokens"), ("gco2", "gCO2"), ("cost", "in money")):
        if (most := limits[f"month_{name}"]) is not None:
            words.append(f"{used.get(name, 0):.4g} of {most:g} {unit} a month")
    if (accuracy_pct := limits["least_accuracy_pct"]) is not None:
        words.append(f"accuracy {accuracy_pct:g} %")
    return "; ".join(words + ([f"priority {limits['priority']}"] if limits["priority"] is not None else []))


def rotate_key(
    key: str,
    overlap: Annotated[str, typer.Option(help="How long the old key still works, such as 1h.")] = "0",
    expires: Expires = None,
    as_json: AsJson = False,
) -> None:
    """Replace a key with a new one of the same tenant, user, role, project, label and limits; it is shown this once."""
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
    output.tell(changed, as_json, f"{key} works " + (f"until {output.clock(at)}" if at else "until it is revoked"))


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
        return output.print_json(key)
    until = f", works until {output.clock(key['expires_at'])}" if key["expires_at"] else ""
    console.print(f"{key['id']}  {_whose(key)}{until}")
    console.print(f"the key, shown this once: {key['secret']}")


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
    found = Gateway().newest("/v1/audit", MOST_ENTRIES, action=action, **params)
    shown = output.table("at", "tenant", "key", "action", "target", "details")
    for entry in found:
        details = ", ".join(f"{name} {value}" for name, value in entry["data"].items())
        at = output.clock(entry["at"], output.SECONDS)
        shown.add_row(at, entry["tenant_id"] or "-", entry["key_id"] or "-", entry["action"], entry["target"], details)
    output.tell(found, as_json, shown if found else "no entries")


Tenant = Annotated[str, typer.Option(help="Whose user it is.")]
Account = Annotated[
    str | None,
    typer.Option(help="Account of the operating system that the user's jobs run as on nodes; none for the agent's."),
]


def list_users(tenant: Tenant = "default", as_json: AsJson = False) -> None:
    """Show a tenant's users."""
    found = Gateway().pages(f"/v1/tenants/{tenant}/users")
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
        return gateway.pages("/v1/keys")
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
