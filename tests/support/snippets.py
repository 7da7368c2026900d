"""The commands in the pages of docs: one for each line of a shell's block, with its continuations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BLOCK = re.compile(r"^```(?:sh|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Snippet:
    """A command of a page."""

    page: str
    command: str


def snippets_of(page: Path) -> Iterator[Snippet]:
    """Yield the commands of a page's shell blocks; a script, which begins with ``#!``, is none."""
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        if block.startswith("#!"):
            continue
        whole = ""
        for line in block.splitlines():
            whole += line + "\n"
            if line.endswith("\\") or not _is_closed(whole):
                continue
            if whole.strip() and not whole.lstrip().startswith("#"):
                yield Snippet(page.name, whole.strip())
            whole = ""
        assert not whole.strip(), f"{page.name}: a command without its end: {whole}"


def _is_closed(text: str) -> bool:
    """Return whether quotes and brackets of ``$(...)`` are closed, so that the next line is another command."""
    bare = re.sub(r"(?<=\s)#[^\n]*", "", text)
    bare = re.sub(r"'[^']*'", "", bare)
    return bare.count("'") % 2 == 0 and bare.count('"') % 2 == 0 and bare.count("(") == bare.count(")")
