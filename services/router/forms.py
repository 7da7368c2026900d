"""Bodies of ``multipart/form-data``: their text fields are read, and one can be changed; files pass unread."""

import re
from functools import lru_cache

_BOUNDARY = re.compile(rb'multipart/form-data\s*;.*boundary=("[^"\r\n]{1,70}"|[^\s;",]{1,70})', re.IGNORECASE)
_NAME = re.compile(rb'content-disposition:[^\r\n]*;\s*name="([^"\r\n]*)"', re.IGNORECASE)
_FILE = re.compile(rb"content-disposition:[^\r\n]*;\s*filename", re.IGNORECASE)
LONGEST_FIELD_BYTES = 1024 * 1024


@lru_cache(maxsize=64)
def boundary_of(content_type: bytes | None) -> bytes | None:
    """Return what separates the parts; None if the body is no form."""
    found = _BOUNDARY.match(content_type or b"")
    return found[1].strip(b'"') if found else None


def places(content: bytes, boundary: bytes) -> dict[str, tuple[int, int]]:
    """Return where the values of text fields begin and end.

    Raises:
        ValueError: It is no form, or has a field twice: servers differ in which one they would take.
    """
    mark, found = b"--" + boundary, dict[str, tuple[int, int]]()
    at = content.find(mark)
    while at >= 0 and content[at + len(mark) : at + len(mark) + 2] != b"--":
        value = content.find(b"\r\n\r\n", at) + 4
        end = content.find(b"\r\n" + mark, value)
        if value < 4 or end < 0:
            break
        head = content[at:value]
        name = _NAME.search(head)
        if name is not None and _FILE.search(head) is None and end - value <= LONGEST_FIELD_BYTES:
            text = name[1].decode("utf-8", "replace")
            if text == "model" and text in found:
                raise ValueError("The form has the field model twice.")
            found[text] = value, end
        at = end + 2
    else:
        if at >= 0:
            return found
    raise ValueError("The body is not the form that its content type announces.")
