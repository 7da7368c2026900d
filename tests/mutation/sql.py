"""Mutations of SQL text: what mutmut's operators do to Python, done to the queries that Python sends."""

import re
from collections.abc import Iterator

STATEMENT = re.compile(
    r"\s*(SELECT|INSERT INTO|UPDATE|DELETE FROM|WITH|ON CONFLICT)\b|.*\b(FROM|WHERE|SET) \w", re.DOTALL
)
"""What SQL text looks like: it begins with a keyword, or holds a clause."""

_OPERAND = r"(?:[\w.]+\([^()]*\)|[\w.$:']+)"
_SWAPS: tuple[tuple[str, str, str], ...] = (
    ("condition removed", rf"\b(AND) {_OPERAND} (?:<=|>=|<>|=|<|>) {_OPERAND}", ""),
    ("AND to OR", r"\bAND\b", "OR"),
    ("OR to AND", r"\bOR\b", "AND"),
    ("comparison", r"(?<= )>=(?= )", ">"),
    ("comparison", r"(?<= )<=(?= )", "<"),
    ("comparison", r"(?<= )>(?= )", ">="),
    ("comparison", r"(?<= )<(?= )", "<="),
    ("comparison", r"(?<= )<>(?= )", "="),
    ("comparison", rf"(?:(?<=WHERE )|(?<=AND )|(?<=OR )|(?<=ON )|(?<=WHEN )){_OPERAND} =(?= )", "{0}<>"),
    ("null test", r"\bIS NULL\b", "IS NOT NULL"),
    ("null test", r"\bIS NOT NULL\b", "IS NULL"),
    ("NOT removed", r"\bNOT (?=\w+ IN\b|EXISTS\b|IN\b|\w+\b(?! NULL))(?<!IS NOT )", ""),
    ("order", r"\bDESC\b", "ASC"),
    ("order", r"\bASC\b", "DESC"),
    ("arithmetic", r"(?<= )\+(?= )", "-"),
    ("arithmetic", r"(?<= )-(?= )", "+"),
    ("arithmetic", r"(?<=[\w)] )\*(?= [\w(])", "/"),
    ("arithmetic", r"(?<= )/(?= )", "*"),
    ("least or greatest", r"\bmin\(", "max("),
    ("least or greatest", r"\bmax\(", "min("),
    ("least or greatest", r"\bgreatest\(", "least("),
    ("least or greatest", r"\bleast\(", "greatest("),
    ("boolean", r"\btrue\b", "false"),
    ("boolean", r"\bfalse\b", "true"),
)
_NUMBER = re.compile(r"(?<![\w.$'])\d+(?![\w.'])")


def mutations(text: str) -> Iterator[tuple[str, str]]:
    """Yield (operator, mutated text) for every place in `text`, a piece of an SQL statement, that an operator fits."""
    for operator, pattern, replacement in _SWAPS:
        for match in re.finditer(pattern, text):
            kept = match.group().removesuffix("=") if replacement.startswith("{0}") else ""
            yield operator, text[: match.start()] + replacement.format(kept) + text[match.end() :]
    for match in _NUMBER.finditer(text):
        yield "number", text[: match.start()] + str(int(match.group()) + 1) + text[match.end() :]
