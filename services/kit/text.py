"""Text files as people bring them: UTF-8 or UTF-16, with or without a byte-order mark, with any line ends."""

from __future__ import annotations

import codecs


def encoding_of(head: bytes) -> str:
    """Return the encoding of a text by its first four bytes; decoding by it leaves out a byte-order mark.

    Text without a mark is UTF-16 if every second byte is 0, as in no UTF-8 text that begins with two characters of
    ASCII; everything else is taken to be UTF-8.
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
        UnicodeDecodeError: It is text of no encoding that ``encoding_of`` knows.
    """
    return content.decode(encoding_of(content[:4])).replace("\r\n", "\n").replace("\r", "\n")
