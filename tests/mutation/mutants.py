"""All mutants of a set of source files, and a uniform sample of them."""

import ast
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

from tests.mutation import sql

UNTOUCHED_CALLS = frozenset({"len", "isinstance", "cast", "TypeVar", "NewType"})
"""Calls left alone: mutmut's own rule for the first two; the others only tell the type checker something."""
TEXT_ARGUMENTS = frozenset({"description", "title", "summary", "paper", "help", "detail"})
"""Keyword arguments whose value is text for people."""
WORDS_OF_A_SENTENCE = 4
"""A string of so many words that is no SQL is text for people, too."""
LOGGERS = frozenset({"log", "logger"})

Operators = Sequence[tuple[Any, Callable[[Any], Iterable[cst.CSTNode]]]]
"""Kinds of nodes, and what each may be replaced by."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        path: Of the file, relative to the root.
        index: Which mutant of its file; with `path` its name, as long as the file does not change.
        operator: What kind of change.
        within: Dotted name of the function or class that it lies in; empty at the top of a module.
        line: Where the changed expression begins, from 1.
        lines: First and last line of the statement, or of the head of a compound statement, that holds the change.
        at_import: Whether that statement runs when the module is imported, so that no single test executes it.
        names: What the statement defines, where it runs at import.
        before: The changed expression as it stands.
        after: What takes its place.
    """

    path: str
    index: int
    operator: str
    within: str
    line: int
    lines: tuple[int, int]
    at_import: bool
    names: tuple[str, ...]
    before: str
    after: str

    @property
    def name(self) -> str:
        """`path#index`."""
        return f"{self.path}#{self.index}"


@dataclass(frozen=True)
class _Site:
    mutant: Mutant
    node: cst.CSTNode
    replacement: cst.CSTNode


class MutatedFile:
    """A source file and all its mutants.

    Left out by rule: imports, annotations, type aliases, decorators, docstrings, `__all__`, calls in
    `UNTOUCHED_CALLS`, log calls, what a `raise` is given, text for people (arguments in `TEXT_ARGUMENTS`,
    sentences), `if TYPE_CHECKING`, `__repr__` and `__str__`. Strings of SQL get the operators of `sql` instead of
    mutmut's for strings.
    """

    def __init__(self, root: Path, path: str, operators: Operators = mutation_operators) -> None:
        wrapper = MetadataWrapper(cst.parse_module((root / path).read_text()))
        visitor = _Visitor(path, wrapper.module, operators)
        wrapper.visit(visitor)
        self._module = wrapper.module
        self._sites = visitor.sites
        self.mutants = [site.mutant for site in self._sites]

    def source_of(self, index: int) -> str | None:
        """Return the whole file with mutant `index` in it; None if that changes nothing or does not compile."""
        site = self._sites[index]
        changed = self._module.deep_replace(site.node, site.replacement)
        assert isinstance(changed, cst.Module)
        try:
            tree = ast.parse(changed.code)
            compile(changed.code, site.mutant.path, "exec")
        except SyntaxError:
            return None
        return None if ast.dump(tree) == ast.dump(ast.parse(self._module.code)) else changed.code


def files_of(root: Path, scope: Sequence[str]) -> list[str]:
    """Return the Python files of `scope` (files and folders), relative to `root`, in order."""
    found: set[Path] = set()
    for part in scope:
        found |= {root / part} if (root / part).is_file() else set((root / part).rglob("*.py"))
    return sorted(str(path.relative_to(root)) for path in found)


def sample(files: Sequence[MutatedFile], size: int, seed: int) -> Iterator[tuple[Mutant, str]]:
    """Yield `size` mutants (or all) with their sources, uniformly from all that compile and change something."""
    everything = [(file, index) for file in files for index in range(len(file.mutants))]
    random.Random(seed).shuffle(everything)
    found = 0
    for file, index in everything:
        if found == size:
            return
        if (source := file.source_of(index)) is not None:
            found += 1
            yield file.mutants[index], source


class _Visitor(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, path: str, module: cst.Module, operators: Operators) -> None:
        super().__init__()
        self._operators = operators
        self.sites: list[_Site] = []
        self._path = path
        self._module = module
        self._statements: list[tuple[tuple[int, int], tuple[str, ...]]] = []
        self._within: list[str] = []
        self._functions = 0
        self._bodies: list[cst.CSTNode] = []
        self._in_sql: list[bool] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if _left_out(node, top=not self._within):
            return False
        if isinstance(node, cst.BaseCompoundStatement | cst.SimpleStatementLine):
            self._statements.append((self._lines(node), _names(node)))
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            self._within.append(node.name.value)
        if isinstance(node, cst.FunctionDef | cst.Lambda):
            self._bodies.append(node.body)
        if node in self._bodies:
            self._functions += 1
        if isinstance(node, cst.BaseString):
            self._in_sql.append(bool(self._in_sql and self._in_sql[-1]) or _is_sql(node))
        self._mutate(node)
        return True

    def on_leave(self, node: cst.CSTNode) -> None:
        if _left_out(node, top=not self._within):
            return
        if isinstance(node, cst.BaseCompoundStatement | cst.SimpleStatementLine):
            self._statements.pop()
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            self._within.pop()
        if node in self._bodies:
            self._functions -= 1
        if isinstance(node, cst.FunctionDef | cst.Lambda):
            self._bodies.remove(node.body)
        if isinstance(node, cst.BaseString):
            self._in_sql.pop()

    def _mutate(self, node: cst.CSTNode) -> None:
        if self._in_sql and self._in_sql[-1]:
            if isinstance(node, cst.SimpleString | cst.FormattedStringText):
                for operator, text in sql.mutations(node.value):
                    self._add(f"SQL: {operator}", node, node.with_changes(value=text))
                return
            if isinstance(node, cst.BaseString):
                return
        for kind, operator in self._operators:
            if isinstance(node, kind):
                for mutated in operator(node):
                    if _only_changes_text(node, mutated):
                        continue
                    self._add(operator.__name__.removeprefix("operator_").replace("_", " "), node, mutated)

    def _add(self, operator: str, node: cst.CSTNode, mutated: cst.CSTNode) -> None:
        lines, names = self._statements[-1]
        line: int = self.get_metadata(PositionProvider, node).start.line
        mutant = Mutant(
            path=self._path,
            index=len(self.sites),
            operator=operator,
            within=".".join(self._within),
            line=line,
            lines=lines,
            at_import=self._functions == 0,
            names=names,
            before=self._module.code_for_node(node).strip(),
            after=self._module.code_for_node(mutated).strip(),
        )
        self.sites.append(_Site(mutant, node, mutated))

    def _lines(self, statement: cst.CSTNode) -> tuple[int, int]:
        where = self.get_metadata(PositionProvider, statement)
        if isinstance(statement, cst.Match):
            return where.start.line, where.start.line
        if isinstance(statement, cst.BaseCompoundStatement) and isinstance(statement.body, cst.IndentedBlock):
            body: int = self.get_metadata(PositionProvider, statement.body.body[0]).start.line
            return where.start.line, max(where.start.line, body - 1)
        return where.start.line, where.end.line


def _left_out(node: cst.CSTNode, top: bool) -> bool:
    match node:
        case cst.Annotation() | cst.Decorator() | cst.Import() | cst.ImportFrom() | cst.Raise() | cst.TypeAlias():
            return True
        case cst.FunctionDef(name=cst.Name("__repr__" | "__str__")):
            return True
        case cst.Expr(value=cst.SimpleString() | cst.ConcatenatedString()):
            return True
        case cst.If(test=cst.Name("TYPE_CHECKING")):
            return True
        case cst.Assign(targets=[cst.AssignTarget(cst.Name("__all__"))]):
            return True
        case cst.Assign(value=cst.Subscript()) if top:  # Floats = NDArray[np.float64]
            return True
        case cst.Arg(keyword=cst.Name(word)) if word in TEXT_ARGUMENTS:
            return True
        case cst.Call(func=cst.Name(word)) if word in UNTOUCHED_CALLS:
            return True
        case cst.Call(func=cst.Attribute(value=cst.Name(word))) if word in LOGGERS:
            return True
        case cst.Assign(value=cst.Call(func=cst.Name(word))) if word in UNTOUCHED_CALLS | {"Log"}:
            return True
        case _:
            return False


def _only_changes_text(node: cst.CSTNode, mutated: cst.CSTNode) -> bool:
    """Whether the difference is a sentence, or an argument that is text for people, dropped or replaced."""
    if isinstance(node, cst.SimpleString):
        return node.raw_value.count(" ") >= WORDS_OF_A_SENTENCE - 1
    if not (isinstance(node, cst.Call) and isinstance(mutated, cst.Call)):
        return False
    left = set(map(id, mutated.args))
    changed = [argument for argument in node.args if id(argument) not in left]
    return any(argument.keyword and argument.keyword.value in TEXT_ARGUMENTS for argument in changed)


def _names(statement: cst.CSTNode) -> tuple[str, ...]:
    """What a statement that runs at import defines: variables, a class's fields, a function for its defaults."""
    if isinstance(statement, cst.FunctionDef | cst.ClassDef):
        return (statement.name.value,)
    if not isinstance(statement, cst.SimpleStatementLine):
        return ()
    names: list[str] = []
    for part in statement.body:
        targets = [one.target for one in part.targets] if isinstance(part, cst.Assign) else []
        targets += [part.target] if isinstance(part, cst.AnnAssign) else []
        names += [target.value for target in targets if isinstance(target, cst.Name)]
    return tuple(names)


def _is_sql(node: cst.BaseString) -> bool:
    return sql.STATEMENT.match(_text(node)) is not None


def _text(node: cst.CSTNode) -> str:
    match node:
        case cst.SimpleString():
            return node.raw_value
        case cst.FormattedStringText():
            return node.value
        case cst.FormattedString():
            return "".join(_text(part) for part in node.parts)
        case cst.ConcatenatedString():
            return _text(node.left) + _text(node.right)
        case _:
            return "x"
