"""The page of a what-if run."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

from lab.report.run_page import Bound, render
from tests.simulator.test_tenants import backlog, run

HOSTILE = "</title></text></li></code><script>x</script>\"' onload=x <img src=x>&lt;"


class _Elements(HTMLParser):
    """What a browser would make of a page: its elements, and the names of their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, ...]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, *(name for name, _ in attrs)))


def test_text_of_strangers_makes_no_element() -> None:
    result = run("fifo", backlog({"a": [1] * 20, "b": [1] * 5}))

    def page(text: str) -> str:
        results = [replace(result, policy=f"{text}{at}", zone=text, signal=text) for at in range(2)]
        return render(results, text, [text], text, Bound(None, text))

    hostile = page(HOSTILE)
    assert _Elements(hostile).found == _Elements(page("x")).found
    assert "onload" in hostile
