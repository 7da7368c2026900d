"""How the command line shows things: one console, tables, and figures in units that people read."""

import codecs
import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.errors import MarkupError
from rich.live import Live
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from services.cli.commands import EXIT_USAGE, CliError
from services.core.domain.units import J_PER_KWH
from services.kit.text import duration as duration
from services.kit.text import visible


class _Console(Console):
    """Shows text from jobs, nodes and servers without letting it control the terminal."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a line or a cell without links; if its brackets are not valid markup, as plain text."""
        text = visible(text)  # before it is laid out: escapes are wider
        try:
            made = super().render_str(text, **options)
        except MarkupError:
            made = super().render_str(text, **{**options, "markup": False})
        made.spans = [span for span in made.spans if "link" not in str(span.style)]
        return made

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; text is broken by the terminal alone, so that a program finds a sentence on one line."""
        super().print(*objects, **{"soft_wrap": all(isinstance(each, str) for each in objects), **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments to show, with control characters made visible except in Rich's own cursor movements."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)


if sys.stdout is None:  # closed by who called
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
for _stream in (sys.stdout, sys.stderr):
    if isinstance(_stream, io.TextIOWrapper):
        _stream.reconfigure(errors="backslashreplace")  # what the terminal cannot show is no reason to stop
# Without a terminal, a table is as wide as it needs to be: a script cannot use a truncated id.
console = _Console(highlight=False, width=None if sys.stdout.isatty() else 200)
errors = _Console(highlight=False, stderr=True)

STATE_STYLES = {
    **dict.fromkeys(("running", "up", "ready", "applied"), "green"),
    **dict.fromkeys(("queued", "asleep", "wanted"), "blue"),
    **dict.fromkeys(("starting", "proposed"), "cyan"),
    **dict.fromkeys(("preempting", "draining", "stopping"), "yellow"),
    **dict.fromkeys(("failed", "lost", "late"), "red"),
    **dict.fromkeys(("cancelled", "ended", "superseded"), "dim"),
    **{"held": "magenta", "succeeded": "dim green"},
}


WATCH_S = 2.0


def show(make: Callable[[], RenderableType], *, watch: bool) -> None:
    """Print what ``make`` returns, once or, to ``watch`` it, again and again until Ctrl-C."""
    if not watch:
        console.print(make())
        return
    if not console.is_terminal:
        raise CliError("--watch needs a terminal; use --json in a loop for a program", EXIT_USAGE)
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            live.update(make(), refresh=True)
            time.sleep(WATCH_S)


def print_json(value: Any) -> None:
    """Print one JSON document for a program."""
    sys.stdout.write(json.dumps(value, indent=2).replace("\x7f", r"\u007f") + "\n")


def tell(answer: Any, as_json: bool, shown: RenderableType) -> None:
    """Print an answer as one JSON document for a program, or what is shown of it to a person."""
    if as_json:
        print_json(answer)
    else:
        console.print(shown)


def say(sentence: str) -> None:
    """Print a sentence on standard error."""
    print(visible(sentence), file=sys.stderr, flush=True)


def print_log(chunks: Iterable[bytes], *, raw: bool = False) -> None:
    r"""Print jobs' output: bytes as they are, but on a terminal with control characters as escapes unless ``raw``.

    A terminal also gets ``\r``, which progress bars need: it reaches no further than the line.
    """
    if raw or not sys.stdout.isatty():
        for chunk in chunks:
            sys.stdout.buffer.write(chunk)
            sys.stdout.flush()
        return
    for text in codecs.iterdecode(chunks, "utf-8", "backslashreplace"):
        sys.stdout.write(visible(text, keep="\r"))
        sys.stdout.flush()


def table(*columns: str, title: str | None = None) -> Table:
    """Return an empty table; columns whose names begin with ``>`` hold figures."""
    made = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for at, column in enumerate(columns):
        is_figure = column.startswith(">")
        justify = "right" if is_figure else "left"
        made.add_column(column.removeprefix(">"), justify=justify, no_wrap=is_figure or at == 0)
    return made


def in_rows(rows: dict[str, str]) -> Table:
    """Return labels and their values as a table."""
    shown = table("", "")
    for label, value in rows.items():
        shown.add_row(f"[bold]{label}[/]", value)
    return shown


def state(name: str) -> str:
    """Return a state in its colour."""
    style = STATE_STYLES.get(name)
    return f"[{style}]{name}[/]" if style else name


def reason(job: dict[str, Any]) -> str:
    """Return why a job is in its state, as words that a narrow column can break between."""
    return (job.get("reason") or "").replace("_", " ")


UNKNOWN = "unknown"
_ENERGY = ((J_PER_KWH / 10, J_PER_KWH, 3, "kWh"), (1_000, 3_600, 2, "Wh"), (0, 1, 0, "J"))
_CARBON = ((1_000, 1_000, 3, "kg"), (1, 1, 2, "g"), (0, 1e-3, 1, "mg"))
_TIME = ((3_600, 3_600, 3, "h"), (60, 60, 2, "min"), (0, 1, 0, "s"))
"""Units: the least that they are used for, their size, decimals, and symbol."""


def energies(energies_j: Iterable[float | None]) -> list[str]:
    """Return the joules of a column as people read them, all in the unit of the largest; None is unknown."""
    return _in_one_unit(list(energies_j), _ENERGY)


def emissions(carbon_gco2: Iterable[float | None]) -> list[str]:
    """Return the emissions of a column as people read them, all in the unit of the largest; None is unknown."""
    return _in_one_unit(list(carbon_gco2), _CARBON)


def times(seconds: Iterable[float | None]) -> list[str]:
    """Return the GPU times of a column, all in the unit of the largest; None is unknown."""
    return _in_one_unit(list(seconds), _TIME)


def energy(energy_j: float) -> str:
    """Return joules as people read them."""
    return energies([energy_j])[0]


def carbon(carbon_gco2: float) -> str:
    """Return an emission as people read it."""
    return emissions([carbon_gco2])[0]


def _in_one_unit(values: list[float | None], units: Sequence[tuple[float, float, int, str]]) -> list[str]:
    most = max((abs(value) for value in values if value is not None), default=0.0)
    _, size, decimals, unit = next((each for each in units if most >= each[0]), units[-1])

    def shown(value: float) -> str:
        own = abs(value / size)
        places = -math.floor(math.log10(own)) if 0 < own < 0.5 * 10**-decimals else decimals  # to its first digit
        return f"{value / size:.{places}f}"

    return [UNKNOWN if value is None else f"{shown(value)} {unit}" for value in values]


def rounded(amount: float) -> str:
    """Return an amount to one decimal, or to three digits if it is small."""
    return f"{amount:.1f}" if abs(amount) >= 100 else f"{amount:.3g}"


def instant(text: str | None) -> datetime | None:
    """Return an API time, or None."""
    return datetime.fromisoformat(text) if text else None


SECONDS = "%Y-%m-%d %H:%M:%S"


def clock(at: str | datetime | None, form: str = "%a %Y-%m-%d %H:%M", *, otherwise: str = "-") -> str:
    """Return a moment, such as an API time, on this machine's clock and with its zone; ``otherwise`` without one."""
    moment = instant(at) if isinstance(at, str) else at
    return f"{moment.astimezone():{form} %Z}" if moment else otherwise


def age(text: str | None) -> str:
    """Return how long ago an API time was."""
    at = instant(text)
    return duration((datetime.now(UTC) - at).total_seconds()) if at else "-"


def progress_share(job: dict[str, Any]) -> float | None:
    """Return the share of the job's work that is done, 0..1, where it is known."""
    progress = job.get("progress")
    if not progress or not progress.get("total"):
        return None
    return min(1.0, progress["done"] / progress["total"])
