"""Tables in pages: only what is between a table's own marks is replaced."""

from __future__ import annotations

import pytest

from lab.reproductions.marked import filled


@pytest.mark.parametrize("old", ["", "old\n", "\nold\n\n"])
def test_a_table_takes_its_own_place_and_no_more(old: str) -> None:
    before = "<!-- zones: kind -->\nof another program\n<!-- end -->\nbefore\n"
    page = f"{before}<!-- one -->\n{old}<!-- end -->\nbetween\n<!-- two -->\nkept\n<!-- end -->\nafter"
    found = filled(page, {"one": lambda: r"| \1 |", "nowhere": pytest.fail})
    assert found == page.replace(f"<!-- one -->\n{old}<!-- end -->", "<!-- one -->\n\n| \\1 |\n\n<!-- end -->")
    assert filled(found, {"one": lambda: r"| \1 |"}) == found
