"""Build ``wattshift-slurm``, a deb or rpm of the bridge to Slurm with a Python of its own.

``python3 deploy/packages/build.py deb rpm --out dist``, run by the CPython that is to be packed, or with its prefix as
``--python``. RHEL 8 and 9 have Python 3.6 and 3.9, and the bridge needs 3.11. What is packed runs wherever the C
library is not older than where that Python and this build are from: build on the oldest distribution that you have.

The packages are those of ``agent.lock``, and NumPy of ``control.lock``, at the hashes that were tested. An rpm needs
``rpmbuild``, a deb ``dpkg-deb``.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = Path("opt/wattshift-slurm")
PACKED = ("contracts", "core", "kit", "engines")
LEFT_OUT = shutil.ignore_patterns(
    "__pycache__", "test", "tests", "idlelib", "tkinter", "ensurepip", "turtledemo", "*.a"
)
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
NAME, SUMMARY = "wattshift-slurm", "Bridge from Slurm to Wattshift: jobs at greener hours"

SPEC = """
%global __os_install_post %{{nil}}
%global _build_id_links none
%global __brp_mangle_shebangs %{{nil}}
AutoReqProv: no
Name: {name}
Version: {version}
Release: 1
Summary: {summary}
License: Apache-2.0
%description
{summary}.
%install
cp -a {tree}/. %{{buildroot}}
%post
systemctl daemon-reload >/dev/null 2>&1 || :
%preun
[ "$1" = 0 ] && systemctl disable --now {name} >/dev/null 2>&1 || :
%files
/{home}
/usr/lib/systemd/system/{name}.service
%config(noreplace) %attr(0600, root, root) /etc/wattshift/slurm.env
"""
CONTROL = """Package: {name}
Version: {version}
Architecture: {architecture}
Maintainer: Wattshift
Section: admin
Priority: optional
Description: {summary}
"""
SCRIPTS = {
    "postinst": "#!/bin/sh\nsystemctl daemon-reload >/dev/null 2>&1 || :\n",
    "prerm": f'#!/bin/sh\n[ "$1" = remove ] && systemctl disable --now {NAME} >/dev/null 2>&1 || :\n',
}


def main(words: Sequence[str]) -> int:
    """Build what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="+", choices=("deb", "rpm"))
    parser.add_argument("--out", type=Path, default=Path("dist"))
    parser.add_argument(
        "--python", type=Path, default=Path(sys.base_prefix), help="the prefix of a CPython from 3.11 on"
    )
    options = parser.parse_args(words)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        lay_out(tree, options.python)
        install(tree / HOME / "python" / "bin" / "python3", Path(folder))
        for kind in options.kinds:
            print((deb if kind == "deb" else rpm)(tree, options.out))
    return 0


def version() -> str:
    """Return the version of this checkout."""
    found = re.search(r'^RELEASE.*= "([^"]+)"', (ROOT / "services" / "kit" / "release.py").read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit("services/kit/release.py names no release")
    return found[1]


def lay_out(tree: Path, python: Path) -> None:
    """Put everything but the packages of the lock where it will be."""
    home, lib = tree / HOME, next(iter(sorted((python / "lib").glob("python3.*"))), python / "lib")
    installed = str(python / "lib" / lib.name / "site-packages")

    def ignored(folder: str, names: list[str]) -> set[str]:
        """Leave out what was installed into that Python, but pip."""
        found = {name for name in names if folder == installed and not name.startswith("pip")}
        return found | LEFT_OUT(folder, names)

    for part in ("bin", "lib"):
        shutil.copytree(python / part, home / "python" / part, symlinks=True, ignore=ignored)
    site = home / "python" / "lib" / lib.name / "site-packages"
    site.mkdir(parents=True, exist_ok=True)
    (site / "wattshift.pth").write_text("../../../../lib\n", encoding="utf-8")
    for name in PACKED:
        shutil.copytree(ROOT / "services" / name, home / "lib" / "services" / name, ignore=LEFT_OUT)
    shutil.copy(ROOT / "services" / "__init__.py", home / "lib" / "services")
    shutil.copytree(ROOT / "clients" / "python" / "src" / "wattshift", home / "lib" / "wattshift", ignore=LEFT_OUT)
    shutil.copy(ROOT / "LICENSE", home)
    shutil.copy(ROOT / "deploy" / "slurm" / "job_submit.lua", home)
    units = tree / "usr" / "lib" / "systemd" / "system"
    settings = tree / "etc" / "wattshift"
    for folder in (units, settings):
        folder.mkdir(parents=True)
    shutil.copy(ROOT / "deploy" / "systemd" / f"{NAME}.service", units)
    shutil.copy(ROOT / "deploy" / "systemd" / "slurm.env.example", settings / "slurm.env")
    (settings / "slurm.env").chmod(0o600)


def install(python: Path, folder: Path) -> None:
    """Install the packages of the lock into the packed Python, without its pip afterwards."""
    wanted = folder / "packages.lock"
    control = (ROOT / "deploy" / "control.lock").read_text(encoding="utf-8")
    numpy = re.search(r"^numpy==.*?(?=^\S|\Z)", control, re.MULTILINE | re.DOTALL)
    agent = (ROOT / "deploy" / "agent.lock").read_text(encoding="utf-8")
    wanted.write_text(agent + (numpy[0] if numpy else ""), encoding="utf-8")
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    options = ["--no-deps", "--require-hashes", "--only-binary=:all:", "--no-compile", "--no-warn-script-location"]
    subprocess.run([*pip, "install", *options, "--requirement", str(wanted)], check=True)
    subprocess.run([*pip, "uninstall", "--yes", "pip"], check=True)
    for each in (python.parents[1] / "bin").iterdir():  # their first lines name where this was built
        if not each.name.startswith("python"):
            each.unlink()


def deb(tree: Path, out: Path) -> Path:
    """Return the deb of a tree."""
    about = tree / "DEBIAN"
    about.mkdir()
    architecture = ARCHITECTURES.get(platform.machine(), platform.machine())
    control = CONTROL.format(name=NAME, version=version(), architecture=architecture, summary=SUMMARY)
    (about / "control").write_text(control, encoding="utf-8")
    (about / "conffiles").write_text("/etc/wattshift/slurm.env\n", encoding="utf-8")
    for name, script in SCRIPTS.items():
        (about / name).write_text(script, encoding="utf-8")
        (about / name).chmod(0o755)
    made = out / f"{NAME}_{version()}_{architecture}.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "-Zxz", "-z1", "--build", str(tree), str(made)], check=True)
    shutil.rmtree(about)
    return made


def rpm(tree: Path, out: Path) -> Path:
    """Return the rpm of a tree."""
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder) / f"{NAME}.spec"
        spec.write_text(
            SPEC.format(name=NAME, version=version(), summary=SUMMARY, tree=tree, home=HOME), encoding="utf-8"
        )
        defined = ["--define", f"_topdir {folder}", "--define", "_binary_payload w2.xzdio"]
        subprocess.run(["rpmbuild", "-bb", *defined, str(spec)], check=True, capture_output=True)
        (made,) = (Path(folder) / "RPMS").rglob("*.rpm")
        return Path(shutil.copy(made, out))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
