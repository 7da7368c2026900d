"""The bar that shows how far a solve is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from services.cli.output import errors
from services.core.domain.progress import Progress as HowFar
from services.core.domain.progress import Report, unreported


@contextmanager
def solving_bar(*, quiet: bool) -> Iterator[Report]:
    """Show a bar on a terminal's standard error while a solve runs; it ends full, unless the solve fails."""
    if quiet or not errors.is_terminal:
        yield unreported
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors) as bar:
        task = bar.add_task("solving", total=1.0)
        furthest = 0.0

        def report(progress: HowFar) -> None:
            nonlocal furthest
            furthest = max(furthest, progress.share)
            best = "" if progress.best is None else f", best {progress.best:.4g}"
            bar.update(task, completed=furthest, description=f"{progress.doing}{best}")

        yield report
        bar.update(task, completed=1.0, description="solved")
