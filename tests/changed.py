"""`./test --changed [COMMIT]`: run the tests that a change since a commit (HEAD) can reach, by what imports what.

A test is reached by the modules that it imports, by those that they import, by the names of modules in its text, as it
starts processes by them, and by the ``conftest.py`` of its folders. What all tests have (``pytest_plugins``) counts as
it is, without what it imports. A file that is not Python counts as the modules beside it. `tests/architecture` reads
every file, and always runs.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath

import pytest

from tests.architecture.rules import imports_of
from tools.bootstrap import ALL_TESTS, ROOT

ALWAYS = "tests/architecture"
OF_ALL = "tests.conftest"
SOURCES = "clients/python/src/"
_NAMES = re.compile(r"""["']([\w.]+)["']""")
FEW = 3
"""So many files run without further processes, each of which would have servers of its own."""


def main(arguments: Sequence[str]) -> int:
    """Run the tests; ``arguments`` may begin with a commit, and the others are pytest's."""
    commit, *rest = arguments if arguments and not arguments[0].startswith("-") else ("HEAD", *arguments)
    files = _git("ls-files", "--cached", "--others", "--exclude-standard")
    changed = {*_git("diff", "--name-only", commit), *_git("ls-files", "--others", "--exclude-standard")}
    texts = {file: (ROOT / file).read_text() for file in files if file.endswith(".py") and (ROOT / file).exists()}
    found = sorted(reached(texts, changed))
    print(f"test: {len(changed)} files have changed since {commit}, and reach {len(found)} files of tests", flush=True)
    workers = ALL_TESTS if len(found) > FEW else ()
    return pytest.main([*workers, "-m", "not slow and not live", ALWAYS, *found, *rest])


def reached(texts: Mapping[str, str], changed: Iterable[str]) -> set[str]:
    """Return the files of tests that changed files can reach.

    Args:
        texts: Every Python file's text, by its path.
        changed: Paths of any files, also of such as are gone.
    """
    files = {_module(path): path for path in texts}
    users: defaultdict[str, set[str]] = defaultdict(set)
    plugins: set[str] = set()
    for name, path in files.items():
        for used in _used(name, path, texts[path], files):
            if name == OF_ALL:
                plugins.add(used)
            else:
                users[used].add(name)
    waiting = [name for path in changed for name in _counts_as(path, files)]
    waiting += [OF_ALL] if plugins & {*waiting} else []
    seen: set[str] = set()
    while waiting:
        if (name := waiting.pop()) not in seen:
            seen.add(name)
            waiting += users[name]
    return {path for name in seen if (path := files.get(name)) and _is_test(path)}


def _used(name: str, path: str, text: str, files: Mapping[str, str]) -> Iterator[str]:
    is_package = path.endswith("__init__.py")
    for each in imports_of(text, name, is_package=is_package):
        yield from _loaded(each.module)
    yield from (each for each in _NAMES.findall(text) if each in files)
    if PurePath(path).parts[0] == "tests":
        yield from (f"{'.'.join(folder.parts)}.conftest" for folder in PurePath(path).parents if folder.parts)


def _loaded(imported: str) -> Iterator[str]:
    """Yield what is imported, also where it is gone, and the packages that are loaded with it."""
    parts = imported.split(".")
    yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def _counts_as(path: str, files: Mapping[str, str]) -> list[str]:
    if path.endswith(".py"):
        return [_module(path)]
    beside = PurePath(path).parent
    return [name for name, each in files.items() if PurePath(each).parent == beside]


def _module(path: str) -> str:
    return path.removeprefix(SOURCES).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _is_test(path: str) -> bool:
    return path.startswith("tests/") and PurePath(path).name.startswith("test_")


def _git(*words: str) -> list[str]:
    return subprocess.check_output(["git", *words], cwd=ROOT, text=True).splitlines()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
