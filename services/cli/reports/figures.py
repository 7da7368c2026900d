"""Figures of a report as tables and pages show them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from services.cli import output
from services.core.accounting.carbon import percent_change

Report = dict[str, Any]


def share(part: float, whole: float) -> str:
    """Return a share in per cent; ``-`` if the whole is not positive."""
    return f"{100 * part / whole:.1f} %" if whole > 0 else "-"


def change(actual: float, baseline: float | None) -> str:
    """Return how much more or less was emitted than in the baseline, with its sign."""
    return output.UNKNOWN if baseline is None else percent_change(actual, baseline)


def title(line: Report) -> str:
    """Return the title of a line: a job's name and id, or both groups if there are two dimensions."""
    name = f"{line['name']} ({line['group']})" if line.get("name") else line["group"]
    return f"{name}, {line['then_group']}" if line.get("then_group") else name


def sums(found: Report, idle: str, total: str) -> list[Report]:
    """Return the lines of idle energy and of the sum, with these titles."""
    return [
        {"group": each, "jobs": "", "footprint": found[of], "accounts": found[f"{of}_accounts"]}
        for of, each in (("idle", idle), ("total", total))
    ]


def amounts(lines: Sequence[Report]) -> list[list[str]]:
    """Return each line's energy, emissions by each account, baseline, and change against it, for a table."""
    used, accounts = [line["footprint"] for line in lines], [line["accounts"] for line in lines]
    columns = [
        _within(used, accounts, "energy_j", output.energies),
        _within(used, accounts, "carbon_gco2", output.emissions),
        *(output.emissions(each[f"{name}_gco2"] for each in accounts) for name in ("market", "embodied", "baseline")),
        [change(own["carbon_gco2"], each["baseline_gco2"]) for own, each in zip(used, accounts, strict=True)],
    ]
    return [list(row) for row in zip(*columns, strict=True)]


def _within(
    used: Sequence[Report], accounts: Sequence[Report], name: str, shown: Callable[[Iterable[float]], list[str]]
) -> list[str]:
    """Return figures, each with the percentage by which it may be off."""
    figures = [each[name] for each in used]
    widths = [(each.get("half_width") or {}).get(name) for each in accounts]
    return [
        text if not width or not figure else f"{text} ±{100 * width / abs(figure):.1f} %"
        for text, figure, width in zip(shown(figures), figures, widths, strict=True)
    ]
