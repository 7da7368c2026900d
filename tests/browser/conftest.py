"""Debian's Chromium before a whole installation; every page that a test leaves is kept as a picture."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from tests.integration.conftest import Installation
from tests.support.servers import ROOT, scratch_folder

PICTURES = ROOT / "results" / "screenshots"
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
ZONE = "Asia/Kolkata"
"""A viewer's time zone that no server has by chance."""
expect.set_options(timeout=20_000)

OpenPage = Callable[..., Page]

TELLS_CUT_TEXT = """
const draw = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...rest) {
  const { actualBoundingBoxLeft: left, actualBoundingBoxRight: right } = this.measureText(text);
  const at = this.getTransform().transformPoint({ x, y }).x;
  const cut = at - left < -1 || at + right > this.canvas.width + 1;
  if (cut && this.canvas.isConnected) console.error(`the edge of a chart cuts "${text}"`);
  return draw.call(this, text, x, y, ...rest);
};
"""


def find_chromium() -> str:
    """Return the browser; root installs Debian's where there is none, and elsewhere the test is skipped."""
    with open(Path(tempfile.gettempdir()) / "wattshift-chromium.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several workers find at once that there is none
        if found := shutil.which("chromium"):
            return found
        if os.geteuid() != 0 or not shutil.which("apt-get"):
            pytest.skip("no Chromium here, and only root can install Debian's")
        get = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300"]
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for words in (["update"], ["install", "-y", "--no-install-recommends", "chromium", "fonts-dejavu-core"]):
            done = subprocess.run([*get, *words], env=environment, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"Debian's Chromium cannot be installed here: {done.stderr.strip()[-300:]}")
    found = shutil.which("chromium")
    assert found
    return found


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """The browser; root needs it without its sandbox.

    No longer than these tests: Playwright's event loop runs in this thread until then, and no other's can.
    """
    path = find_chromium()
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        found = playwright.chromium.launch(executable_path=path, args=arguments)
        yield found
        found.close()


@pytest.fixture(scope="package")
def site(browser: Browser) -> Iterator[Installation]:
    """An installation with two simulated nodes of four GPUs, and grid time that passes as ours does."""
    del browser  # skips before anything is started
    with scratch_folder() as folder:
        made = Installation(folder / "data", CARBON_REPLAY_SPEED="1", WATTSHIFT_ZONE="US-CAL-CISO")
        made.up()
        yield made
        made.down()


@pytest.fixture
def open_page(browser: Browser, site: Installation, request: pytest.FixtureRequest) -> Iterator[OpenPage]:
    """Open a path, signed in or not; an error that the page logs, or text that a chart cuts, fails the test."""
    pages: list[Page] = []
    problems: list[str] = []

    def hear(message: ConsoleMessage) -> None:
        if message.type == "error" and "status of 4" not in message.text:  # refusals that tests ask for
            problems.append(message.text)

    def opened(path: str, *, key: str | None = None, **options: Any) -> Page:
        context = browser.new_context(
            base_url=site.gateway.url, locale="en-GB", **{"timezone_id": ZONE, "color_scheme": "light", **options}
        )
        context.add_init_script(TELLS_CUT_TEXT)
        page = context.new_page()
        page.on("console", hear)
        page.on("pageerror", lambda error: problems.append(str(error)))
        pages.append(page)
        if key != "":
            sign_in(page, key or admin_key(site))
        page.goto(path)
        return page

    yield opened
    for number, page in enumerate(pages):
        keep_picture(page, f"{request.node.name}-{number}" if number else request.node.name)
        page.context.close()
    assert problems == []


def admin_key(site: Installation) -> str:
    """Return the first key of the installation."""
    return (site.folder / "admin.key").read_text().strip()


def sign_in(page: Page, key: str) -> None:
    """Sign in as a person does."""
    page.goto("/")
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Sign in", exact=True).click()


def keep_picture(page: Page, name: str) -> None:
    """Keep what the whole page shows under ``results/screenshots``."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"{re.sub(r'[^A-Za-z0-9-]+', '-', name).strip('-')}.png", full_page=True)
