"""Run mutants on workers, each with a copy of the sources of its own."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue

from tests.mutation.mutants import Mutant
from tests.mutation.results import Result
from tests.mutation.selection import CoverageMap
from tests.mutation.worker import OUT_OF_TIME

WORKER_FILES = ("worker.py", "mutation_hooks.py")
TIMES = 5.0
"""A test may take this many times what it took when the map was made, and `seconds_more`."""


class Worker:
    """A process that judges one mutant at a time, in a copy of the sources."""

    def __init__(self, copy: Path, packages: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(copy / "tests" / "mutation" / "worker.py"), json.dumps(list(packages))],
            cwd=copy,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            text=True,
            start_new_session=True,  # Linux shares the processors among sessions
        )

    def judge(self, mutant: Mutant, source: str, tests: dict[str, float]) -> Result:
        """Run `tests` (id: seconds it may take) on a mutant."""
        if not tests:
            return Result(mutant, 0, None, 0.0)
        assert self._process.stdin
        assert self._process.stdout
        work = {"name": mutant.name, "path": mutant.path, "source": source, "tests": tests}
        print(json.dumps(work), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        return Result(mutant, len(tests), answer["killed_by"], answer["seconds"])

    def close(self) -> None:
        """Let the process end."""
        self._process.communicate()


@contextmanager
def copy_of(root: Path) -> Iterator[Path]:
    """Yield a copy of what git tracks, or could track, under `root` (of everything, where there is no git)."""
    with tempfile.TemporaryDirectory(prefix="wattshift-mutants-") as folder:
        copy = Path(folder)
        copy.chmod(0o755)
        listing = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        listed = subprocess.run(listing, capture_output=True, text=True)
        names = listed.stdout.split("\0")[:-1] if listed.returncode == 0 else []
        for name in names or [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]:
            if (root / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, copy / name)
        (copy / "tests" / "mutation").mkdir(parents=True, exist_ok=True)
        for name in WORKER_FILES:
            shutil.copy2(Path(__file__).parent / name, copy / "tests" / "mutation" / name)
        yield copy


def run(
    root: Path,
    wanted: Sequence[tuple[Mutant, str]],
    tests: CoverageMap,
    *,
    workers: int,
    budget_s: float,
    seconds_more: float = 30.0,
    report: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Try mutants and return their results, in the order given; what killed one also runs on unchanged code.

    Args:
        root: Of the sources.
        wanted: Mutants with the sources of their files.
        tests: Which tests execute what.
        workers: How many at a time.
        budget_s: How long the tests of one mutant may take altogether, by the map; what does not fit is not run, so
            that a mutant that only they would notice counts as a survivor.
        seconds_more: What a test may take beyond `TIMES` what it took for the map. A mutant that one takes longer on is
            judged again alone, with three times as long, and counts as killed if it does not end then.
        report: Called with each result as it comes, from any thread.
    """
    with ExitStack() as stack:
        free: SimpleQueue[Worker] = SimpleQueue()
        for _ in range(workers):
            worker = Worker(stack.enter_context(copy_of(root)), tests.packages)
            stack.callback(worker.close)
            free.put(worker)

        def judge(mutant: Mutant, source: str, unfit: Set[str] = frozenset(), longer: float = 1.0) -> Result:
            chosen = [test for test in tests.tests_for(mutant, budget_s) if test not in unfit]
            return on_a_worker(mutant, source, chosen, longer)

        def on_a_worker(mutant: Mutant, source: str, chosen: Sequence[str], longer: float = 1.0) -> Result:
            worker = free.get()
            try:
                limits = {test: longer * (seconds_more + TIMES * tests.seconds(test)) for test in chosen}
                return worker.judge(mutant, source, limits)
            finally:
                free.put(worker)

        def judge_and_report(each: tuple[Mutant, str]) -> Result:
            result = judge(*each)
            report(result)
            return result

        with ThreadPoolExecutor(workers) as threads:
            results = list(threads.map(judge_and_report, wanted))

        # A machine that was busy may be why a test took so long: such a mutant is judged again, alone.
        for at, result in enumerate(results):
            if (result.killed_by or "").endswith(OUT_OF_TIME):
                results[at] = judge(*wanted[at], longer=3.0)

        # A test that fails on unchanged code as well has killed nothing.
        unfit: set[str] = set()
        killers = {result.killed_by for result in results if result.killed_by} & tests.names
        while wanted and (left := sorted(killers - unfit)):
            unchanged = wanted[0][0], (root / wanted[0][0].path).read_text()
            failed = on_a_worker(*unchanged, left).killed_by
            if failed is None:
                break
            if failed not in killers:
                raise RuntimeError(f"the tests do not run on unchanged code: {failed}")
            unfit.add(failed)
        return [
            judge(*each, unfit) if result.killed_by in unfit else result
            for each, result in zip(wanted, results, strict=True)
        ]
