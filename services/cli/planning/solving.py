"""What commands that solve share: the request from a file, the bar that shows how far it is, and the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from services.cli.bars import bar
from services.cli.commands import EXIT_USAGE, CliError
from services.cli.output import errors, print_json
from services.contracts.invalid import first_error
from services.core.domain.errors import DomainError
from services.core.domain.solving import Progress, Report, unreported

if TYPE_CHECKING:
    from pydantic import BaseModel

M = TypeVar("M", bound="BaseModel")


def checked(document: object, model: type[M], where: str) -> M:
    """Return a document as a message; ``CliError``, which begins with ``where``, if it is none."""
    from pydantic import ValidationError

    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise CliError(f"{where}: {first_error(error, whole='the file')}", EXIT_USAGE) from None


def solved(file: Path, solve: Callable[[Report], M], *, quiet: bool) -> tuple[M, float]:
    """Return a solution and how long it took, seconds; ``CliError`` if the problem in ``file`` has none."""
    began_s = time.perf_counter()
    try:
        with solving_bar(quiet=quiet) as report:
            return solve(report), time.perf_counter() - began_s
    except DomainError as error:
        raise CliError(f"{file}: {error}", EXIT_USAGE) from None


def print_solution(result: BaseModel, solve_s: float) -> None:
    """Print a solution, and how long it took, as one JSON document."""
    print_json(result.model_dump(mode="json", exclude={"kind"}) | {"solve_s": round(solve_s, 4)})


@contextmanager
def solving_bar(*, quiet: bool) -> Iterator[Report]:
    """Show a bar on a terminal's standard error while a solve runs; it ends full, unless the solve fails."""
    if quiet or not errors.is_terminal:
        yield unreported
        return
    furthest = 0.0
    with bar("solving") as advance:

        def report(progress: Progress) -> None:
            nonlocal furthest
            furthest = max(furthest, progress.share)
            best = "" if progress.best is None else f", best {progress.best:.4g}"
            advance(f"{progress.doing}{best}", round(100 * furthest), 100)

        yield report
