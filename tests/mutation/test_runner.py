"""The runner, on a toy: it finds what tests kill and what they let live, and states the share as it is."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutation import sql
from tests.mutation.mutants import MutatedFile, sample
from tests.mutation.results import Result, read, share, survivors, table, wilson, write
from tests.mutation.running import run
from tests.mutation.selection import CoverageMap

TOY = '''"""A toy."""

from functools import cache
from itertools import repeat

LIMIT = 3


def capped(value: int) -> int:
    """Return `value`, or the limit."""
    if value > LIMIT:
        return LIMIT
    return value


def untested(value: int) -> int:
    return value + 1


@cache
def three():
    return 3


def ones():
    return sum(repeat(1, 3))


def endless(value: int) -> int:
    while value > 0:
        value -= 1
    return value
'''
TESTS = """from toy.limits import capped, endless, ones, three


def test_below():
    assert capped(2) == 2


def test_above():
    assert capped(9) == 3


def test_ends():
    assert endless(2) == 0


def test_ones():
    assert ones() == 3


def test_three():
    assert three() > 2


def test_three_again():
    assert three() == 3
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("toy")
    for name, text in {"toy/__init__.py": "", "toy/limits.py": TOY, "tests/test_limits.py": TESTS}.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "--import-mode=importlib"\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # the toy needs none, and they take most of the time
        yield root


@pytest.fixture(scope="module")
def tests(root: Path, tmp_path_factory: pytest.TempPathFactory) -> CoverageMap:
    tests = CoverageMap(root, tmp_path_factory.mktemp("map"), ["toy"], ["tests"])
    tests.bring_up_to_date()
    return tests


@pytest.fixture(scope="module")
def results(root: Path, tests: CoverageMap) -> list[Result]:
    wanted = list(sample([MutatedFile(root, "toy/limits.py")], 100, seed=1))
    return run(root, wanted, tests, workers=1, budget_s=10, seconds_more=0.5)


def test_the_map_says_which_tests_execute_a_line(tests: CoverageMap) -> None:
    line = {text.strip(): number for number, text in enumerate(TOY.splitlines(), 1)}
    both = {"tests/test_limits.py::test_below", "tests/test_limits.py::test_above"}

    assert len(tests.names) == 6
    assert tests.executing("toy/limits.py", line["if value > LIMIT:"], line["if value > LIMIT:"]) == both
    assert tests.executing("toy/limits.py", line["return LIMIT"], line["return LIMIT"]) == {
        "tests/test_limits.py::test_above"
    }
    assert tests.executing("toy/limits.py", line["return value + 1"], line["return value + 1"]) == set()


def test_what_tests_notice_is_killed_and_what_they_do_not_survives(results: list[Result]) -> None:
    found = {(result.mutant.within, result.mutant.before, result.mutant.after): result for result in results}
    killers = {change: (result.killed_by or "").rpartition("::")[2] for change, result in found.items()}

    assert killers.pop(("", "LIMIT = 3", "LIMIT = None")) in ("test_below", "test_above")
    assert killers == {
        ("", "3", "4"): "test_above",
        ("capped", "> LIMIT", ">= LIMIT"): "",  # equivalent
        ("untested", "value + 1", "value - 1"): "",
        ("untested", "1", "2"): "",
        ("endless", "> 0", ">= 0"): "test_ends",
        ("endless", "0", "1"): "test_ends",
        ("endless", "value -= 1", "value += 1"): "test_ends (out of time)",
        ("endless", "value -= 1", "value = 1"): "test_ends (out of time)",
        ("endless", "1", "2"): "",
        ("three", "3", "4"): "test_three_again",
        ("ones", "sum(repeat(1, 3))", "sum(None)"): "test_ones",
        ("ones", "repeat(1, 3)", "repeat(None, 3)"): "test_ones",
        ("ones", "repeat(1, 3)", "repeat(1, None)"): "test_ones",
        ("ones", "repeat(1, 3)", "repeat(3)"): "test_ones (out of time)",  # in C, where no alarm is heard
        ("ones", "repeat(1, 3)", "repeat(1, )"): "test_ones (out of time)",
        ("ones", "1", "2"): "test_ones",
        ("ones", "3", "4"): "test_ones",
    }


def test_the_share_and_its_interval_are_those_of_the_mutants(results: list[Result], tmp_path: Path) -> None:
    write(tmp_path / "results.json", results)
    results = read(tmp_path / "results.json")

    assert share(results) == 14 / 18
    assert table(results).splitlines()[-1] == "| **all** | 18 | 14 | 77.8 % | 54.8 to 91.0 % |"
    assert survivors(results).count("\n -> ") == 4
    assert "toy/limits.py:17 untested [number, 0 tests]\n    1\n -> 2" in survivors(results)


def test_the_sources_are_left_as_they_were(root: Path, results: list[Result]) -> None:
    assert (root / "toy/limits.py").read_text() == TOY


def test_a_test_that_fails_on_unchanged_code_kills_nothing(root: Path, tests: CoverageMap) -> None:
    (mutant,) = (one for one in MutatedFile(root, "toy/limits.py").mutants if one.within == "three")
    source, path = MutatedFile(root, "toy/limits.py").source_of(mutant.index), root / "tests/test_limits.py"
    assert source is not None
    path.write_text(TESTS.replace("three() == 3", "three() == 5"))
    try:
        (result,) = run(root, [(mutant, source)], tests, workers=1, budget_s=10)
    finally:
        path.write_text(TESTS)

    assert result.killed_by is None


def test_a_new_test_is_mapped_without_running_the_others(root: Path, tests: CoverageMap) -> None:
    new = root / "tests" / "test_more.py"
    new.write_text("from toy.limits import untested\n\n\ndef test_more():\n    assert untested(1) == 2\n")
    try:
        tests.bring_up_to_date()
    finally:
        new.unlink()

    runs = [json.loads(file.read_text()) for file in sorted(tests.folder.glob("runs/*/tests.*.json"))]
    assert [len(ran) for ran in runs] == [6, 1]
    assert tests.executing("toy/limits.py", 17, 17) == {"tests/test_more.py::test_more"}


def test_a_sample_is_the_same_for_the_same_seed(root: Path) -> None:
    def names(seed: int, size: int) -> list[str]:
        return [mutant.name for mutant, _ in sample([MutatedFile(root, "toy/limits.py")], size, seed)]

    assert names(1, 5) == names(1, 5) == names(1, 10)[:5]
    assert sorted(names(1, 100)) == sorted(names(2, 100))
    assert names(1, 100) != names(2, 100)


def test_text_for_people_and_for_type_checkers_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "quiet.py").write_text(
        '"""Doc."""\nfrom typing import cast\n__all__ = ["f"]\nFloats = list[float]\n\n\ndef f(x: "int | None"):\n'
        '    """Doc."""\n    log.info("said", x=1)\n    raise ValueError("not " + "this")\n\n\n@cache(size=3)\n'
        "def g(x):\n    return len(cast(int, x))\n\n\ndef h():\n    yield 'It runs on GPUs.'\n    f(detail='x')\n"
    )
    assert MutatedFile(tmp_path, "quiet.py").mutants == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("WHERE id = $1 AND version = $2", {"WHERE id = $1 ", "WHERE id = $1 OR version = $2"}),
        ("WHERE a <= b", {"WHERE a < b"}),
        ("ORDER BY at DESC LIMIT 1", {"ORDER BY at ASC LIMIT 1", "ORDER BY at DESC LIMIT 2"}),
        ("AND ended_at IS NULL", {"OR ended_at IS NULL", "AND ended_at IS NOT NULL"}),
        ("SET lease_until = $1", set()),
    ],
)
def test_sql_is_mutated_as_sql(before: str, after: set[str]) -> None:
    assert after <= {text for _, text in sql.mutations(before)}
    assert bool(after) == bool(list(sql.mutations(before)))


def test_strings_of_sql_are_known_wherever_they_stand(tmp_path: Path) -> None:
    (tmp_path / "q.py").write_text('Q = "SELECT a " f"FROM t WHERE b > {x} " "AND c"\nname = "queued"\n')
    operators = [mutant.operator for mutant in MutatedFile(tmp_path, "q.py").mutants]

    assert operators.count("SQL: comparison") == operators.count("SQL: AND to OR") == 1
    assert operators.count("string") == 2  # "XXqueuedXX" and "QUEUED"


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(0, 0, 0.0, 1.0), (0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (360, 400, 0.8667, 0.9258)],
)
def test_the_interval_is_wilsons(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson(successes, trials) == pytest.approx((low, high), abs=1e-4)


def test_it_is_a_command() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "tests.mutation", "--help"], capture_output=True, text=True, check=True
    )
    assert "--survivors" in shown.stdout
