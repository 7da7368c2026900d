"""The monthly page, from the ledger to a browser: what is on it, and whether it can be read."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from services.cli.reports.report_page import checksum_of, render
from tests.telemetry.conftest import Plane
from tests.telemetry.month import populate, report_of_the_month
from tests.telemetry.test_accounts import module_plane

__all__ = ["module_plane"]

LONG = "a-project-with-a-name-that-is-as-long-as-names-may-be-63-chars"
MADE_AT = datetime(2026, 11, 2, 8, tzinfo=UTC)
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

MEASURE = """
<script>
const luminance = (c) => c.slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
const rgb = text => text.match(/[0-9.]+/g).map(Number);
const ground = luminance(rgb(getComputedStyle(document.body).backgroundColor).slice(0, 3)
    .map((v, at, all) => getComputedStyle(document.body).backgroundColor === 'rgba(0, 0, 0, 0)' ? 255 : v));
const contrast = colour => {
    const [dark, bright] = [luminance(rgb(colour)), ground].sort((a, b) => a - b);
    return (bright + 0.05) / (dark + 0.05);
};
const texts = [...document.querySelectorAll('h1, h2, p, li, td, th, b, span, code, figcaption')]
    .map(e => getComputedStyle(e).color)
    .concat([...document.querySelectorAll('svg text')].map(e => getComputedStyle(e).fill));
const measured = {
    wider: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    cut: [...document.querySelectorAll('.wide')].filter(e => e.scrollWidth > e.clientWidth).length,
    charts: [...document.querySelectorAll('svg')].map(e => e.getBoundingClientRect().height),
    contrast: Math.min(...texts.map(contrast)),
    dark: ground < 0.2,
    fetched: performance.getEntriesByType('resource').length,
};
document.title = JSON.stringify(measured);
</script></body>
"""


async def test_the_page_of_a_month_states_what_its_figures_rest_on(plane: Plane) -> None:
    await populate(plane, ["vision", "speech"], days=7)
    found = await report_of_the_month(plane.http)
    page = render(found, MADE_AT)

    text = html.unescape(re.sub(r"<[^>]+>", " ", page))
    whole = found
    jobs_kwh = sum(line["footprint"]["energy_j"] for line in whole["lines"]) / 3.6e6
    assert jobs_kwh == pytest.approx(2 * 1.1 * (5 * (2.4 + 6.1 + 1.7) + 2 * 2.4))
    assert whole["signals"] == ["average_direct"]
    assert whole["total_accounts"]["estimated_gco2"] == pytest.approx(
        whole["total"]["carbon_gco2"] * whole["total"]["estimated_energy_j"] / whole["total"]["energy_j"], rel=0.02
    ), "the CPU's energy is modelled, and so are its emissions"
    for words in ("average direct", "PUE, mean 1.5", "Estimated share of the emissions 8", "Sign-off", "ISO/IEC 21031"):
        assert words in re.sub(r"\s+", " ", text)
    assert "report late may still be added" not in text
    assert "report late may still be added" in render(found, datetime(2026, 10, 20, tzinfo=UTC))


async def test_a_month_without_energy_says_so_and_can_be_signed(plane: Plane) -> None:
    page = render(await report_of_the_month(plane.http), MADE_AT)
    assert "No energy was recorded in this period." in page
    assert page.count("<table") == 1
    assert checksum_of(page) is not None


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")
@pytest.mark.parametrize(("width", "dark"), [(1100, False), (1100, True), (760, False)])
async def test_a_browser_shows_every_column_and_text_that_can_be_read(
    plane: Plane, tmp_path: Path, width: int, dark: bool
) -> None:
    await populate(plane, ["vision", LONG], days=9)
    page = render(await report_of_the_month(plane.http), MADE_AT)

    measured = look_at(page, tmp_path, width, dark)

    assert measured["dark"] is dark
    assert measured["fetched"] == 0
    assert (measured["wider"], measured["cut"]) == (0, 0), "no column is out of sight"
    assert len(measured["charts"]) == 2
    assert min(measured["charts"]) > 150
    assert measured["contrast"] >= 4.5, "WCAG 2, level AA"


def look_at(page: str, folder: Path, width: int, dark: bool) -> dict[str, Any]:
    """Return what a browser measured of a page."""
    file = folder / "page.html"
    file.write_text(page.replace("</body>", MEASURE), encoding="utf-8")
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={width},2000"]
    done = subprocess.run(
        [str(BROWSER), *options, *scheme, f"--user-data-dir={folder / 'profile'}", "--dump-dom", file.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    title = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    assert title, done.stderr[-2_000:]
    return json.loads(html.unescape(title[1]))
