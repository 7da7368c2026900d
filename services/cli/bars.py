"""The progress bar of commands that take a while: on standard error, and full once the work is done."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from services.cli.output import errors

Advance = Callable[[str, int, int | None], None]
"""Says how much is done, of how much in all where that is known, and what of."""


@contextmanager
def bar(title: str = "", *, quiet: bool = False, each_its_own: bool = False) -> Iterator[Advance]:
    """Yield a function that moves a bar; if the block ends without an error, the bar is shown full.

    Args:
        title: What stands beside the bar until the work says what it is doing.
        quiet: Show nothing, as for a program.
        each_its_own: Give every named piece of work a bar of its own.
    """
    columns = (
        *(TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()),
        *(TimeElapsedColumn(), TimeRemainingColumn()),
    )
    with Progress(*columns, console=errors, disable=quiet) as shown:
        tasks = {} if each_its_own else {"": shown.add_task(title, total=None)}

        def advance(what: str, done: int, of: int | None = None) -> None:
            name = what if each_its_own else ""
            if name not in tasks:
                tasks[name] = shown.add_task(what, total=of)
            shown.update(tasks[name], completed=done, total=of, description=what or title)

        yield advance
        for task in shown.tasks:
            total = task.total if task.total is not None else max(task.completed, 1)
            shown.update(task.id, completed=total, total=total)
