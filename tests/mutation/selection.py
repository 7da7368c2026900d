"""Which tests execute a line: a map made by running the tests once under coverage, with the test as the context."""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence, Set
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import coverage

from tests.mutation.mutants import Mutant, files_of

HOOKS = Path(__file__).parent
RUN_FOLDERS = "runs"


class CoverageMap:
    """What every test executes and how long it takes.

    It lies in a folder and is brought up to date: a change of the sources, or of a `conftest.py`, makes all of it anew;
    a changed or new test file is run alone.

    Args:
        root: Of the sources; tests run there.
        folder: Where the map lies.
        sources: Folders whose lines count.
        tests: Files and folders of tests.
    """

    def __init__(self, root: Path, folder: Path, sources: Sequence[str], tests: Sequence[str]) -> None:
        self.folder = folder
        self._root, self._sources, self._test_places = root, sources, tests
        self._seconds: dict[str, float] = {}
        self._contexts: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))

    def bring_up_to_date(self, extra: Sequence[str] = ()) -> None:
        """Run the tests whose file changed (all, if a source changed), and read what the map says."""
        stated = json.loads(self._state.read_text()) if self._state.exists() else {"sources": "", "files": {}}
        sources = _digest(self._root, [*files_of(self._root, self._sources), *self._shared()])
        files = {path: _digest(self._root, [path]) for path in self._test_files()}
        if stated["sources"] != sources:
            stated = {"sources": sources, "files": {}}
        changed = [path for path, digest in files.items() if stated["files"].get(path, {}).get("digest") != digest]
        if changed:
            run = self.folder / RUN_FOLDERS / str(1 + max([0, *(int(old.name) for old in self._runs())]))
            run.mkdir(parents=True)
            (run / "root.txt").write_text(str(self._root))
            self._measure(run, changed, extra)
            for path in changed:
                stated["files"][path] = {"digest": files[path], "run": run.name}
        stated["files"] = {path: stated["files"][path] for path in files}
        self._state.write_text(json.dumps(stated))
        self._read({path: entry["run"] for path, entry in stated["files"].items()})

    @property
    def _state(self) -> Path:
        return self.folder / "state.json"

    def _runs(self) -> list[Path]:
        return [run for run in (self.folder / RUN_FOLDERS).glob("*") if run.name.isdigit()]

    def _test_files(self) -> list[str]:
        return [path for path in files_of(self._root, self._test_places) if Path(path).name.startswith("test_")]

    def _shared(self) -> list[str]:
        return [path for path in files_of(self._root, ["tests"]) if Path(path).name == "conftest.py"]

    def _measure(self, run: Path, files: Sequence[str], extra: Sequence[str]) -> None:
        environment = os.environ | {
            "MUTATION_MAP": str(run),
            "MUTATION_SOURCES": json.dumps([str(self._root / source) for source in self._sources]),
            "PYTHONPATH": os.pathsep.join([str(self._root), str(HOOKS)]),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "mutation_hooks"]
        with (run / "output.txt").open("w") as output:
            words = [*command, "-p", "no:cacheprovider", *extra, *files]
            done = subprocess.run(words, cwd=self._root, env=environment, stdout=output, stderr=output)
        if done.returncode not in (0, 1):  # 1: tests failed; they are not used
            raise RuntimeError(f"pytest ended with {done.returncode}; see {run / 'output.txt'}")

    def _read(self, run_of: dict[str, str]) -> None:
        names: dict[tuple[str, str], bool] = {}
        for run in {self.folder / RUN_FOLDERS / name for name in run_of.values()}:
            for listed in run.glob("tests.*.json"):
                tests: dict[str, Any] = json.loads(listed.read_text())
                for name, seen in tests.items():
                    usable = seen["passed"] and seen["ran"] and run_of.get(name.partition("::")[0]) == run.name
                    names[run.name, name] = usable
                    if usable:
                        self._seconds[name] = seen["seconds"]
            for file in run.glob("coverage.*"):
                data = coverage.CoverageData(str(file))
                data.read()
                root = (run / "root.txt").read_text()
                for measured in data.measured_files():
                    path = os.path.relpath(measured, root)
                    for line, contexts in data.contexts_by_lineno(measured).items():
                        self._contexts[path][line].update(name for name in contexts if names.get((run.name, name)))

    @property
    def packages(self) -> list[str]:
        """Packages of others that the tests use, worth importing once for all."""
        listed = [json.loads(file.read_text()) for run in self._runs() for file in run.glob("modules.*.json")]
        return sorted({module for modules in listed for module in modules})

    @property
    def names(self) -> Set[str]:
        """All tests that the map holds."""
        return self._seconds.keys()

    def seconds(self, test: str) -> float:
        """Return how long a test took when the map was made, its fixtures included."""
        return self._seconds[test]

    def executing(self, path: str, first: int, last: int) -> set[str]:
        """Return the tests that execute one of these lines of a file."""
        lines = self._contexts[path]
        return set().union(*(lines.get(line, ()) for line in range(first, last + 1)))

    def tests_for(self, mutant: Mutant, budget_s: float) -> list[str]:
        """Return the tests that could notice a mutant, the quickest first, as many as fit into the budget.

        What runs at import is executed by no test: for that, the tests of the lines that name what it defines, then
        those that only read data (they execute nothing), then those of its module.
        """
        if mutant.at_import:
            named = set().union(*(self._naming(name) for name in mutant.names))
            readers = self._reading_only - named
            order = self._quickest(named) + self._quickest(readers)
            order += self._quickest(self._of_module(mutant.path) - named - readers)
        else:
            order = self._quickest(self.executing(mutant.path, *mutant.lines))
        chosen: list[str] = []
        total_s = 0.0
        for test in order:
            total_s += self._seconds[test]
            if chosen and total_s > budget_s:
                break
            chosen.append(test)
        return chosen

    def _quickest(self, tests: set[str]) -> list[str]:
        return sorted(tests, key=lambda test: (self._seconds[test], test))

    @cached_property
    def _reading_only(self) -> set[str]:
        executing = [contexts for lines in self._contexts.values() for contexts in lines.values()]
        return set(self._seconds).difference(*executing)

    def _of_module(self, path: str) -> set[str]:
        return set().union(*self._contexts[path].values())

    @cache  # noqa: B019 - one map per run
    def _naming(self, name: str) -> set[str]:
        word = re.compile(rf"\b{name}\b")
        found: set[str] = set()
        for path in list(self._contexts):
            for number, text in enumerate((self._root / path).read_text().splitlines(), 1):
                if word.search(text):
                    found |= self._contexts[path].get(number, set())
        return found


def _digest(root: Path, paths: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.encode() + b"\0" + (root / path).read_bytes())
    return digest.hexdigest()
