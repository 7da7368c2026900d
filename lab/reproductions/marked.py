"""Pages whose tables are made by programs: what stands between ``<!-- NAME -->`` and ``<!-- end -->``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

PLACE = re.compile(r"<!-- (?!end )([\w-]+) -->\n(?:(?!<!-- ).)*<!-- end -->", re.DOTALL)


def filled(text: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """Return a page with these tables made anew; a table without a place is not made, other places stay as they are."""

    def made(place: re.Match[str]) -> str:
        name = place[1]
        return f"<!-- {name} -->\n\n{tables[name]()}\n\n<!-- end -->" if name in tables else place[0]

    return PLACE.sub(made, text)


def fill(page: Path, tables: Mapping[str, Callable[[], str]]) -> None:
    """Make these tables of a page anew."""
    page.write_text(filled(page.read_text(encoding="utf-8"), tables), encoding="utf-8")
