"""Find the operations of a path, given the path as it was sent."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from urllib.parse import unquote_to_bytes

T = TypeVar("T")

# What a name in a path may consist of: nothing that a service, a database or a log could read in another way.
SEGMENT = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._~:-]{0,254}")


@dataclass(slots=True)
class _Node(Generic[T]):
    literals: dict[bytes, _Node[T]] = field(default_factory=dict[bytes, "_Node[T]"])
    named: _Node[T] | None = None
    methods: dict[str, T] | None = None


@dataclass(frozen=True, slots=True)
class Match(Generic[T]):
    """The operations of a path, and the normalised path."""

    methods: dict[str, T]
    path: str


class Matcher(Generic[T]):
    """A tree of path segments; a literal segment is tried before a named one."""

    def __init__(self, routes: Iterable[tuple[str, str, T]]) -> None:
        """Take ``(method, path, value)``; path segments in braces match any ``SEGMENT``."""
        self._root: _Node[T] = _Node()
        for method, path, value in routes:
            node = self._root
            for segment in path.encode().split(b"/")[1:]:
                if segment.startswith(b"{"):
                    node.named = node.named or _Node()
                    node = node.named
                else:
                    node = node.literals.setdefault(segment, _Node())
            node.methods = node.methods or {}
            node.methods[method] = value

    def match(self, raw_path: bytes) -> Match[T] | None:
        """Return the operations of a path as it was sent, still percent-encoded; None if there are none."""
        if not raw_path.startswith(b"/"):
            return None
        segments = raw_path.split(b"/")[1:]
        if b"%" in raw_path:  # decoded after the split: an encoded slash is part of a name, and no name has one
            segments = [unquote_to_bytes(segment) for segment in segments]
        methods = self._find(self._root, segments, 0)
        return None if methods is None else Match(methods, "/" + b"/".join(segments).decode())

    def _find(self, node: _Node[T], segments: list[bytes], index: int) -> dict[str, T] | None:
        if index == len(segments):
            return node.methods
        segment = segments[index]
        literal = node.literals.get(segment)
        if literal and (found := self._find(literal, segments, index + 1)) is not None:
            return found
        if node.named and SEGMENT.fullmatch(segment):
            return self._find(node.named, segments, index + 1)
        return None
