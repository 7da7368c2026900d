"""Text that users supply, in any encoding and with any line endings, and untrusted text that is shown or exported."""

import codecs
import csv
import re
from collections.abc import Iterable
from typing import IO, Any, TypeVar

N = TypeVar("N", int, float)


def encoding_of(head: bytes) -> str:
    """Return the encoding of a text by its first four bytes; decoding with it removes a byte-order mark.

    Text without a mark is UTF-16 if every second byte is 0, which no UTF-8 text that begins with two ASCII characters
    has; everything else is taken to be UTF-8.
    """
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-32" if head.startswith(codecs.BOM_UTF32_LE) else "utf-16"
    zeros = [byte == 0 for byte in head[:4]]
    if zeros in ([False, True, False, True], [True, False, True, False]):
        return "utf-16-be" if zeros[0] else "utf-16-le"
    return "utf-8-sig"


def decoded(content: bytes) -> str:
    r"""Return the text of a file without its byte-order mark; lines end with ``\n``.

    Raises:
        UnicodeDecodeError: The text is in no encoding that ``encoding_of`` knows.
    """
    return content.decode(encoding_of(content[:4])).replace("\r\n", "\n").replace("\r", "\n")


def decimal(text: str, kind: type[N] = float) -> N:
    """Return a number as text; ``ValueError`` for what is none, and for ``1_0``, which Python alone reads as ten."""
    if "_" in text:
        raise ValueError(text)
    return kind(text)


def duration(seconds: float) -> str:
    """Return a duration in its two largest units."""
    left = max(0, round(seconds))
    parts: list[str] = []
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")):
        count, left = divmod(left, size)
        if count or (unit == "s" and not parts):
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
r"""What a terminal may obey instead of showing it: controls but ``\n`` and ``\t``, and marks that change the direction
of text; and halves of surrogate pairs, which no stream takes."""


_FORMULA = re.compile(rf"[=+\-@\t\n]|{CONTROLS.pattern}")
_NUMBER = re.compile(r"[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|inf|nan)")


def visible(text: str, keep: str = "") -> str:
    r"""Return text with each of ``CONTROLS``, except those in ``keep``, as its escape, such as ``\x1b``."""
    if text.isprintable():  # no character of CONTROLS is; most text is, and this is found out in no time
        return text
    return CONTROLS.sub(
        lambda found: found[0] if found[0] in keep else found[0].encode("unicode_escape").decode(), text
    )


def write_row(file: IO[str], cells: Iterable[Any]) -> None:
    """Write a CSV row that contains no formula for a spreadsheet to evaluate and no control sequence for a terminal."""
    csv.writer(file, lineterminator="\n").writerow(_cell(cell) for cell in cells)


def _cell(value: Any) -> Any:
    if not isinstance(value, str) or _NUMBER.fullmatch(value):
        return value
    return ("'" if _FORMULA.match(value) else "") + visible(value)
