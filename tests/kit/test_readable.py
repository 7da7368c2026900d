"""Rows that cannot be read."""

from services.kit.readable import BY_ID, each_readable
from services.kit.routes import one_page, read_cursor


def test_a_page_that_ends_with_a_row_that_cannot_be_read_has_a_next_one() -> None:
    rows = [{"id": "a", "n": "1"}, {"id": "b", "n": "x"}, {"id": "c", "n": "3"}]
    found = each_readable(rows, lambda row: (row["id"], int(row["n"])), "row", BY_ID)

    page, cursor = one_page(found, 2, lambda each: each[0])
    assert (page, read_cursor(cursor, "[a-z]")) == ([("a", 1)], "b")
    assert one_page(found[2:], 2, lambda each: each[0]) == ([("c", 3)], None)
