"""Commands for webhooks."""

from typing import Annotated, Any

import typer

from services.cli import output
from services.cli.client import Gateway
from services.cli.commands import EXIT_FAILED, EXIT_USAGE, AsJson, CliError, Group
from services.cli.output import console
from services.cli.values import duration_s

EVENTS = ("job.started", "job.ended", "budget.exceeded", "node.lost")


def register(app: typer.Typer) -> None:
    words = "Have messages about jobs, budgets and nodes posted to an address."
    webhooks = Group(app, "webhooks", words, list_webhooks)
    webhooks.add(create_webhook, list_webhooks, show_webhook, rotate_webhook, test=send_test)
    webhooks.add(enable_webhook, disable_webhook, delete_webhook)


def create_webhook(
    url: Annotated[str, typer.Argument(help="Where messages are posted to, such as https://example.org/hook.")],
    events: Annotated[str, typer.Option(help=f"Which events, separated by commas: {', '.join(EVENTS)}.")] = "job.ended",
    project: Annotated[str | None, typer.Option(help="Only jobs and budgets of this project.")] = None,
    as_json: AsJson = False,
) -> None:
    """Create a webhook; its secret is shown this once."""
    chosen = [word.strip() for word in events.split(",") if word.strip()]
    if unknown := [word for word in chosen if word not in EVENTS]:
        raise CliError(f"--events {unknown[0]}: must be of {', '.join(EVENTS)}", EXIT_USAGE)
    if not chosen:
        raise CliError(f"--events: name at least one of {', '.join(EVENTS)}", EXIT_USAGE)
    made = Gateway().call("POST", "/v1/webhooks", body={"url": url, "events": chosen, "project": project})
    _print_secret(made, as_json)


def list_webhooks(as_json: AsJson = False) -> None:
    """Show the webhooks and whether their last message was accepted."""
    found = Gateway().get("/v1/webhooks")["items"]
    shown = output.table("webhook", "tenant", "project", "events", "state", "url")
    for webhook in found:
        words = webhook["tenant_id"], webhook["project"] or "(all)", ", ".join(webhook["events"]), _state(webhook)
        shown.add_row(webhook["id"], *words, webhook["url"])
    output.tell(found, as_json, shown if found else "no webhooks")


def show_webhook(webhook: str, as_json: AsJson = False) -> None:
    """Show a webhook, and what became of its last messages."""
    found = Gateway().get(f"/v1/webhooks/{webhook}")
    if as_json:
        return output.print_json(found)
    console.print(f"{found['id']}  {_state(found)}")
    console.print(f"{', '.join(found['events'])} of {found['project'] or 'all projects'} to {found['url']}")
    if found["disabled_reason"]:
        console.print(f"disabled: {found['disabled_reason']}; `wattshift webhooks enable {found['id']}`")
    shown = output.table("message", "event", "made", "state", ">attempts", "next", "outcome")
    for delivery in found["deliveries"]:
        upcoming = output.clock(delivery["next_attempt_at"])
        words = delivery["event"], f"{output.age(delivery['created_at'])} ago", delivery["state"]
        shown.add_row(delivery["id"], *words, str(delivery["attempts"]), upcoming, _outcome(delivery))
    console.print(shown if found["deliveries"] else "no messages yet")


def send_test(webhook: str, as_json: AsJson = False) -> None:
    """Send a test message and show what became of it; exit status 1 if it was not accepted."""
    sent = Gateway().call("POST", f"/v1/webhooks/{webhook}/test")
    output.tell(sent, as_json, f"{sent['id']}  {sent['state']}: {_outcome(sent)}")
    if sent["state"] != "delivered":
        raise typer.Exit(EXIT_FAILED)


def rotate_webhook(
    webhook: str,
    overlap: Annotated[str, typer.Option(help="How long messages are signed with the old secret as well.")] = "24h",
    as_json: AsJson = False,
) -> None:
    """Replace a webhook's secret; the new one is shown this once."""
    body = {"overlap_s": duration_s(overlap, "--overlap")}
    _print_secret(Gateway().call("POST", f"/v1/webhooks/{webhook}/rotate", body=body), as_json)


def enable_webhook(webhook: str) -> None:
    """Resume sending messages; events in the meantime are not sent."""
    Gateway().call("PATCH", f"/v1/webhooks/{webhook}", body={"enabled": True})
    console.print(f"{webhook} is enabled")


def disable_webhook(webhook: str) -> None:
    """Stop sending messages until the webhook is enabled again."""
    Gateway().call("PATCH", f"/v1/webhooks/{webhook}", body={"enabled": False})
    console.print(f"{webhook} is disabled")


def delete_webhook(webhook: str) -> None:
    """Delete a webhook; pending messages are not sent."""
    Gateway().call("DELETE", f"/v1/webhooks/{webhook}")
    console.print(f"{webhook} is deleted")


def _state(webhook: dict[str, Any]) -> str:
    if not webhook["enabled"]:
        return "[dim]disabled[/]"
    if webhook["failing_since"]:
        return f"[red]failing for {output.age(webhook['failing_since'])}[/]"
    return "[green]enabled[/]"


def _outcome(delivery: dict[str, Any]) -> str:
    return delivery["error"] or (f"answered {delivery['status']}" if delivery["status"] else "not attempted yet")


def _print_secret(webhook: dict[str, Any], as_json: bool) -> None:
    if as_json:
        return output.print_json(webhook)
    console.print(f"{webhook['id']}  {', '.join(webhook['events'])} to {webhook['url']}")
    console.print(f"the secret, shown this once: {webhook['secret']}")
