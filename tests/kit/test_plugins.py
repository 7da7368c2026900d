"""Policies of other packages: installed by pip, found by entry points, refused in one line if they are broken."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli.commands import CliError
from services.cli.plugins import add_plugins
from services.core.cycle.run_cycle import run_cycle
from services.core.domain.errors import PolicyConfigError
from services.core.policies.registry import LAB, POLICIES, add_policy, build_policy
from services.kit.policies import load_policies
from tests.support.builders import NOON_S, a_job, a_node, a_snapshot

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/plugins/youngest_first"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder where packages can be installed for one test; the example's module can be imported."""
    folder, known = tmp_path / "site", dict(POLICIES)
    folder.mkdir()
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.syspath_prepend(folder)
    yield folder
    for module in ("youngest_first", "added"):
        sys.modules.pop(module, None)
    POLICIES.clear()
    POLICIES.update(known)


def install(site: Path, entry: str, source: str = "", package: str = "added") -> None:
    """Leave what pip leaves of a package that adds one policy."""
    (site / "added.py").write_text(source)
    info = site / f"{package}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[wattshift.policies]\n{entry}\n")


def test_a_policy_installed_by_pip_is_simulated_as_ours_are(tmp_path: Path) -> None:
    site, package = tmp_path / "site", tmp_path / "package"
    shutil.copytree(EXAMPLE, package)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-compile"]
    alone = ["--no-index", "--no-deps", "--no-build-isolation", "--target", str(site), str(package)]
    subprocess.run([*pip, *alone], check=True, capture_output=True)

    command = [sys.executable, "-m", "services.cli.main", "simulate", "training", "--policy", "youngest-first"]
    done = subprocess.run(
        [*command, "--jobs", "green-day", "--carbon", "GB", "--start", "2023-08-01", "--days", "0.05"],
        env={"PYTHONPATH": f"{ROOT}:{site}"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "youngest-first" in done.stdout


@pytest.mark.parametrize(
    ("entry", "source", "why"),
    [
        ("mine = added:POLICY", "import no_such_module", "cannot be loaded: ModuleNotFoundError: No module named"),
        ("mine = added:POLICY", "POLICY = 3", "is of type int instead of PolicyEntry"),
        ("fifo = added:POLICY", "from youngest_first import POLICY", "there is a policy called 'fifo' already"),
        ("mine = added:POLICY", "from youngest_first import POLICY", "calls itself 'youngest-first', not 'mine'"),
    ],
)
def test_a_broken_one_is_one_line(site: Path, entry: str, source: str, why: str) -> None:
    install(site, entry, source)

    with pytest.raises(CliError) as caught:
        add_plugins()

    (line,) = str(caught.value).splitlines()
    assert "package added" in line
    assert why in line


def test_two_packages_may_not_use_one_name(site: Path) -> None:
    install(site, "youngest-first = youngest_first:POLICY")
    install(site, "youngest-first = youngest_first:POLICY", package="again")

    with pytest.raises(CliError, match="has the same name as plugin 'youngest-first'"):
        add_plugins()


def test_policies_are_loaded_once_and_stay_in_order(site: Path) -> None:
    ours = list(POLICIES)
    install(site, "youngest-first = youngest_first:POLICY")

    load_policies()
    load_policies()

    assert list(POLICIES) == sorted({*ours, "youngest-first", *LAB}), "the lab is installed where tests run"
    assert build_policy("youngest-first", {}).name == "youngest-first"
    with pytest.raises(PolicyConfigError, match="already"):
        add_policy("las+zeus", POLICIES["youngest-first"])


def test_the_example_starts_the_youngest(site: Path) -> None:
    install(site, "youngest-first = youngest_first:POLICY")
    load_policies()
    jobs = [a_job(f"{minutes}", submitted_s=NOON_S - 60 * minutes) for minutes in (3, 1, 2)]

    plan = run_cycle(build_policy("youngest-first", {}), a_snapshot(jobs, [a_node(gpus=1)]), None).plan

    assert plan.actions[0].job_id == "1"
