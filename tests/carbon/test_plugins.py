"""Carbon providers of other packages: found by entry points, and refused in one line if they are broken."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from carbon_service.providers.registry import PROVIDERS, known_providers
from carbon_service.zones import ZoneConfigError
from services.contracts.carbon import CurrentIntensity, IntensityOutlook
from services.kit.plugins import PluginError
from tests.carbon.harness import Now, running
from tests.carbon.test_process import started

EXAMPLE = Path(__file__).parents[2] / "examples/plugins/flat_grid"
ENTRY = "from dataclasses import replace\nfrom flat_grid import ENTRY as FLAT\nENTRY = replace(FLAT, name={name!r})\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder where packages can be installed for one test; the example's module can be imported."""
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for module in ("flat_grid", "added"):
        sys.modules.pop(module, None)


def install(site: Path, entry: str, source: str = "") -> None:
    """Leave what pip leaves of a package that adds one provider."""
    (site / "added.py").write_text(source)
    info = site / "added-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: added\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[wattshift.carbon_providers]\n{entry}\n")


async def test_a_provider_of_another_package_serves_a_zone(
    site: Path, empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, "flat = flat_grid:ENTRY")
    monkeypatch.setenv("CARBON_FLAT_GCO2_PER_KWH", "42")

    async with running(empty_database, Now(), zones="HOME", providers="HOME=flat") as client:
        current = CurrentIntensity.model_validate_json((await client.get("/v1/carbon/HOME/current")).content)
        outlook = IntensityOutlook.model_validate_json((await client.get("/v1/carbon/HOME/outlook")).content)

    assert (current.provider, current.point.gco2_per_kwh, current.is_stale) == ("flat", 42, False)
    assert {point.gco2_per_kwh for point in outlook.points} == {42}
    assert {"measured", "persistence"} <= {point.kind for point in outlook.points}


async def test_its_settings_are_asked_for_as_ours_are(site: Path, empty_database: str) -> None:
    install(site, "flat = flat_grid:ENTRY")

    with pytest.raises(ZoneConfigError, match="zone HOME is to come from flat, which needs CARBON_FLAT_GCO2_PER_KWH"):
        async with running(empty_database, Now(), zones="HOME", providers="HOME=flat"):
            pass


def test_without_other_packages_there_are_ours() -> None:
    assert known_providers() == PROVIDERS


@pytest.mark.parametrize(
    ("entry", "source", "why"),
    [
        ("flat = added:ENTRY", "import no_such_module", "cannot be loaded: ModuleNotFoundError: No module named"),
        ("flat = added:ENTRY", "ENTRY = 3", "is of type int instead of ProviderEntry"),
        ("uk = added:ENTRY", ENTRY.format(name="uk"), "there is a provider called 'uk' already"),
        ("mine = added:ENTRY", ENTRY.format(name="yours"), "the provider calls itself 'yours', not 'mine'"),
    ],
)
def test_a_broken_one_is_one_line(site: Path, entry: str, source: str, why: str) -> None:
    install(site, entry, source)

    with pytest.raises(PluginError) as caught:
        known_providers()

    (line,) = str(caught.value).splitlines()
    assert "package added" in line
    assert why in line


def test_the_process_ends_with_that_line(site: Path) -> None:
    install(site, "flat = added:ENTRY", "import no_such_module")

    ended = started(PYTHONPATH=str(site))

    assert ended.returncode == 2
    assert ended.stderr.startswith("carbon service: plugin 'flat' (wattshift.carbon_providers, package added)")
    assert len(ended.stderr.strip().splitlines()) == 1
