"""What the levers saved, as reports and `top` show it: always as stored, never recomputed."""

from datetime import UTC, datetime, timedelta
from typing import Any

from services.cli import output
from services.cli.client import Gateway
from services.cli.commands import EXIT_NOT_FOUND, EXIT_REFUSED, CliError

RECENT = timedelta(days=9)


def stored(gateway: Gateway, period: dict[str, str | None]) -> dict[str, Any] | None:
    """Return the savings of a period; None if none are stored, or if the caller may not see them."""
    try:
        return gateway.get("/v1/reports/savings", **period)
    except CliError as error:
        if error.exit_code in (EXIT_REFUSED, EXIT_NOT_FOUND):
            return None
        raise


def newest(gateway: Gateway) -> dict[str, Any] | None:
    """Return the savings of the newest day whose jobs were replayed; None if there is none."""
    start = (datetime.now(UTC) - RECENT).isoformat()
    found = stored(gateway, {"start": start, "end": None})
    days = [day for day in found["days"] if day["levers"]] if found else []
    return days[-1] if days else None


def sentences(found: dict[str, Any] | None) -> list[str]:
    """Return what was saved in a period, in sentences; none where nothing is stored."""
    if found is None or found["total"] is None:
        return []
    first, *others = told(found["total"])
    return [f"{first} (days replayed: {len(found['days'])})", *others]


def briefly(day: dict[str, Any]) -> list[str]:
    """Return a day's savings in a line and, where there are none, why and what slack would have brought in another."""
    between = f"{output.carbon(day['low_gco2'])} to {output.carbon(day['high_gco2'])}"
    first = f"saved {day['day']}: {output.carbon(day['saved_gco2'])} CO2 ({between}): {_levers(day)}"
    return [first, *([f"{day['why']} {' '.join(_slack(day))}".strip()] if day["why"] else [])]


def told(total: dict[str, Any]) -> list[str]:
    """Return savings in sentences: against what, how sure, by which lever, why none, and what slack would bring."""
    if not total["levers"]:
        return [f"Saved: nothing is known. {total['why']}"]
    between = f"{output.carbon(total['low_gco2'])} to {output.carbon(total['high_gco2'])} at 90 %"
    first = (
        f"Saved against the same jobs under fifo: {output.carbon(total['saved_gco2'])} CO2 ({between}), "
        f"{_later(total['later_s'])}: {_levers(total)}"
    )
    return [first, *([total["why"]] if total["why"] else []), *_slack(total)]


def _levers(total: dict[str, Any]) -> str:
    levers = [(each["lever"].replace("_", " "), each) for each in total["levers"]]
    saved = [f"{lever} {output.carbon(each['saved_gco2'])}" for lever, each in levers if each.get("known", True)]
    unknown = ", ".join(lever for lever, each in levers if not each.get("known", True))
    return ", ".join(saved) + (f"; not known, as no history tells how jobs answer to it: {unknown}" if unknown else "")


def _slack(total: dict[str, Any]) -> list[str]:
    slack = total["slack_saved_gco2"]
    if slack is None or slack <= 0:
        return []
    share = f" ({slack / total['emitted_gco2']:.0%})" if total["emitted_gco2"] > 0 else ""
    saved, time = output.carbon(slack), output.duration(total["slack_s"])
    return [f"{time} of slack would have saved {saved} more{share}, {_later(total['slack_later_s'])}."]


def _later(seconds: float | None) -> str:
    if seconds is None:
        return "time unknown"
    return f"jobs ending {output.duration(abs(seconds))} {'earlier' if seconds < 0 else 'later'} on average"
