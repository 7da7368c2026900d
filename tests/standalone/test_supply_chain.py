"""The list of what the images are made of, and the audit of it."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from deploy import supply_chain
from tests.support.servers import ROOT

LOCK = ROOT / "deploy" / "agent.lock"


@pytest.mark.slow
def test_the_document_names_every_package_of_the_lock_with_its_version(tmp_path: Path) -> None:
    wanted = ["sbom", "--lock", str(LOCK), "--output", str(tmp_path / "s.json"), "--tools", str(tmp_path / "tools")]
    if (status := supply_chain.main(wanted)) == supply_chain.SKIPPED:
        pytest.skip("the tools cannot be installed from here")
    assert status == 0

    document = json.loads((tmp_path / "s.json").read_text())
    assert document["bomFormat"] == "CycloneDX"
    assert {each["name"]: each["version"] for each in document["components"]} == locked(LOCK)
    assert all(each.get("purl") == f"pkg:pypi/{each['name']}@{each['version']}" for each in document["components"])


def locked(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9._-]+)(?:\[[^\]]*\])?==([^\s\\;]+)", path.read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", ["agent.lock", "control.lock"])
def test_an_image_has_what_the_product_needs_in_the_versions_that_are_tested(name: str) -> None:
    image, tested = locked(ROOT / "deploy" / name), locked(ROOT / "requirements.lock")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[^A-Za-z0-9._-]", each, maxsplit=1)[0].lower() for each in project["dependencies"]}

    assert {package: version for package, version in image.items() if tested.get(package) != version} == {}
    assert needed - {*image} == set()


def said(*packages: dict[str, object]) -> str:
    return json.dumps({"dependencies": packages, "fixes": []})


SOUND = {"name": "a", "version": "1", "vulns": []}
UNKNOWN = {"name": "b", "skip_reason": "not found"}
FLAWED = {"name": "c", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3"], "aliases": []}]}


@pytest.mark.parametrize(
    ("answer", "status", "line"),
    [
        (said(SOUND, UNKNOWN), 0, "1 of 2 packages audited, 0 advisories"),
        (said(SOUND, FLAWED), 1, "c 2: PYSEC-1, mended in 3"),
        (said(UNKNOWN), supply_chain.SKIPPED, "the advisories of no package"),
        ("", supply_chain.SKIPPED, "the advisories cannot be read: no route"),
    ],
)
def test_an_audit_says_what_is_vulnerable_and_why_it_found_out_nothing(
    answer: str, status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert supply_chain.report(answer, "a\nno route") == status
    assert line in "".join(capsys.readouterr())
