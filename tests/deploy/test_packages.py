"""The packages of the bridge to Slurm: what is in them, and that their own Python runs it wherever they are."""

from __future__ import annotations

import configparser
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from services.engines.slurm.settings import SlurmSettings
from tests.support.debian import needs_program
from tests.support.servers import ROOT

UNIT = ROOT / "deploy" / "systemd" / "wattshift-slurm.service"
EXAMPLE = ROOT / "deploy" / "systemd" / "slurm.env.example"


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """Return the program that builds packages."""
    spec = importlib.util.spec_from_file_location("build", ROOT / "deploy" / "packages" / "build.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tree(build: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what is packed, but with a link to this Python for a copy, and without the lock's packages."""
    python = tmp_path_factory.mktemp("python")
    (python / "bin").mkdir()
    (python / "bin" / "python3").symlink_to(sys.executable)
    (python / "lib" / "python3.11" / "site-packages" / "left_here").mkdir(parents=True)
    made = tmp_path_factory.mktemp("tree")
    build.lay_out(made, python)
    return made


def test_what_is_packed_imports_nothing_that_is_not(build: ModuleType, tree: Path) -> None:
    home = tree / build.HOME
    assert not list(home.rglob("left_here")), "what is installed here does not belong there"
    code = "import services.engines.slurm.app as app, wattshift; print(app.__file__, wattshift.__file__)"
    command = [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(home / 'lib')!r}); {code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    assert [Path(word).is_relative_to(home) for word in done.stdout.split()] == [True, True]


def test_a_deb_says_what_it_is_and_keeps_settings(build: ModuleType, tree: Path, tmp_path: Path) -> None:
    needs_program("dpkg-deb", "dpkg")
    made = build.deb(tree, tmp_path)
    fields = subprocess.run(["dpkg-deb", "--field", made, "Package", "Version"], capture_output=True, text=True)
    assert fields.stdout.split() == ["Package:", "wattshift-slurm", "Version:", build.version()]
    listed = subprocess.run(["dpkg-deb", "--contents", made], capture_output=True, text=True).stdout.splitlines()
    (settings,) = [line for line in listed if line.endswith("./etc/wattshift/slurm.env")]
    assert settings.startswith("-rw------- root/root")
    kept = subprocess.run(["dpkg-deb", "--info", made, "conffiles"], capture_output=True, text=True).stdout
    assert kept.split() == ["/etc/wattshift/slurm.env"]
    assert any(line.endswith("./usr/lib/systemd/system/wattshift-slurm.service") for line in listed)
    assert not (tree / "DEBIAN").exists()


def test_the_unit_runs_what_is_packed_with_settings_that_the_bridge_reads(
    build: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = configparser.ConfigParser(strict=False)
    parser.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]
    parser.read(tree / "usr" / "lib" / "systemd" / "system" / "wattshift-slurm.service")
    service = parser["Service"]
    assert service["ExecStart"] == f"/{build.HOME}/python/bin/python3 -P -m services.engines.slurm.app"
    assert "TOKEN" not in service["ExecStart"]
    assert service["EnvironmentFile"] == "/etc/wattshift/slurm.env"
    lines = [line.removeprefix("#") for line in EXAMPLE.read_text().splitlines() if "=" in line and line[:2] != "# "]
    given = dict(line.split("=", 1) for line in lines)
    known = {f"ENGINE_SLURM_{name}".upper() for name in SlurmSettings.model_fields}
    assert {name for name in given if name.startswith("ENGINE_")} <= known
    for name, value in given.items():
        if "TLS" not in name:
            monkeypatch.setenv(name, value)
    assert SlurmSettings().mode == "dry_run"  # pyright: ignore[reportCallIssue]


@pytest.mark.slow
def test_its_own_python_runs_it_wherever_it_is_put(tmp_path: Path) -> None:
    """The whole of it, from the lock; both packages hold the same files."""
    needs_program("dpkg-deb", "dpkg")
    kinds = ["deb", *(["rpm"] if shutil.which("rpmbuild") else [])]
    command = [sys.executable, str(ROOT / "deploy" / "packages" / "build.py"), *kinds, "--out", str(tmp_path / "dist")]
    subprocess.run(command, check=True)
    (made,) = (tmp_path / "dist").glob("*.deb")
    subprocess.run(["dpkg-deb", "--extract", made, tmp_path / "elsewhere"], check=True)
    python = tmp_path / "elsewhere" / "opt" / "wattshift-slurm" / "python" / "bin" / "python3"
    command = [str(python), "-P", "-c", "import sys, numpy, services.engines.slurm.app as app; print(app.__file__)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={}, cwd="/")
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "elsewhere")
    for each in (tmp_path / "dist").glob("*.rpm"):
        listed = subprocess.run(["rpm", "-qlp", each], capture_output=True, text=True, check=True).stdout
        assert "/usr/lib/systemd/system/wattshift-slurm.service" in listed.splitlines()
