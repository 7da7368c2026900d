"""Pictures of every page with data in it: light, dark and on a phone, and the two of the README.

    .venv/bin/python -m tests.browser.pictures --minutes 6            # results/pictures: to be looked at
    .venv/bin/python -m tests.browser.pictures --keep                 # docs/pictures: those of the README

An installation of its own with a fleet of two applications under load, a pool, jobs of all kinds with long names and
errors, and a list of 10,000 jobs that are held; the grid's recording runs at `--speed`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, expect, sync_playwright

from gateway.dashboard.pages import PAGES
from services.cli.commands import CliError
from tests.browser.conftest import PHONE, admin_key, find_chromium, sign_in
from tests.integration.conftest import Installation
from tests.support.servers import ROOT, scratch_folder, wait_until

LOOKED_AT, KEPT = ROOT / "results" / "pictures", ROOT / "docs" / "pictures"
NODES = "1x4:H200-SXM-141GB@US-CAL-CISO,2x4@US-CAL-CISO,1x4@DE"
EXAMPLES = ROOT / "examples"
HELD, BATCH = 10_000, 500
LONGEST = "a-name-that-is-as-long-as-the-longest-name-that-jobs-may-have.1"
LOOKS: dict[str, dict[str, Any]] = {"light": {}, "dark": {"color_scheme": "dark"}, "phone": PHONE}
TRAIN = "{python} {examples}/train.py --steps {steps} --step-seconds 0.05 --scaling 0.96 --gpu-load {load}"


def a_training(name: str, project: str, gpus: dict[str, int], steps: int, load: float, **more: Any) -> dict[str, Any]:
    """Return a job that computes as long as it says, and draws power for it."""
    command = TRAIN.format(python=sys.executable, examples=EXAMPLES, steps=steps, load=load).split()
    return {
        "name": name,
        "project": project,
        "command": command,
        "gpus": gpus,
        "processes": "per_node",
        "work": {"total": steps, "unit": "steps"},
        **more,
    }


def jobs(minutes: float) -> list[dict[str, Any]]:
    """Return jobs in every state: done, failed, running, waiting for more than there is, held."""
    long = round(minutes * 60 * 20 * 8)
    return [
        a_training("resnet50-warm-up", "vision", {"min": 1, "max": 2}, 300, 0.9),
        {"name": "nightly-evaluation", "project": "language", "command": ["sh", "-c", "echo done; sleep 5"]},
        {"name": "broken-import", "project": "speech", "command": [sys.executable, "-c", "import no_such_package"]},
        a_training("train-resnet-50", "vision", {"min": 2, "max": 4}, long, 0.9),
        a_training("gpt2-medium", "language", {"min": 1, "max": 2}, long, 1.0),
        a_training(LONGEST, "a-project-with-a-name-of-many-words", {"min": 1}, long, 0.3),
        a_training("llama-finetune", "language", {"min": 8}, long, 1.0),
        {"name": "needs-more-than-there-is", "project": "ads", "command": ["true"], "gpus": {"min": 64}},
        {"name": "held-for-review", "project": "ads", "command": ["true"], "hold": True},
    ]


def set_up(site: Installation, minutes: float) -> dict[str, str]:
    """Give the installation its fleet, pool and jobs; return the jobs' ids by name."""
    put = site.gateway.call
    terms = {"gpus": 4, "gpu_model": "H200-SXM-141GB", "zone": "US-CAL-CISO"}
    put("PUT", "/v1/fleets/images", body=terms)
    for name in ("photos", "streets"):
        wattshift(site, "apps", "set", name, str(EXAMPLES / "apps" / f"{name}.json"))
    wattshift(site, "pools", "set", "chat", str(EXAMPLES / "pools" / "two-zones.json"))
    ids: dict[str, str] = {}
    for spec in jobs(minutes):
        try:
            ids[spec["name"]] = put("POST", "/v1/jobs", body=spec)["id"]
        except CliError as error:
            print(f"{spec['name']}: {error}")
    for start in range(0, HELD, BATCH):
        batch = [
            {"name": f"sweep-{n:05}", "project": "sweep", "command": ["true"], "hold": True}
            for n in range(start, start + BATCH)
        ]
        put("POST", "/v1/jobs:batch", body={"jobs": batch})
    return ids


def wattshift(site: Installation, *words: str) -> None:
    """Run a command of the command line against the installation."""
    command = [Path(sys.executable).with_name("wattshift"), *words]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "WATTSHIFT_DATA_DIR": str(site.folder)})


@contextmanager
def visited(site: Installation, seconds: float) -> Iterator[None]:
    """Have visitors ask the applications for so long."""
    wait_until(lambda: all(app["running"] for app in site.gateway.get("/v1/apps")["items"]), 180)
    router = f"http://127.0.0.1:{site.process('router').port}"
    words = ["--router", router, "--key", admin_key(site), "--seconds", str(seconds), "photos=20", "streets=10"]
    with subprocess.Popen([sys.executable, str(EXAMPLES / "apps" / "visitors.py"), *words]) as visitors:
        try:
            yield
        finally:
            visitors.terminate()


def settled(page: Page) -> None:
    """Return when the page shows what it has asked for, and its curves."""
    expect(page.locator("main .loading:visible")).to_have_count(0, timeout=60_000)
    page.wait_for_timeout(700)


def opened(browser: Browser, site: Installation, path: str, **options: Any) -> Page:
    """Return a page of somebody who has signed in."""
    page = browser.new_context(base_url=site.gateway.url, locale="en-GB", **options).new_page()
    sign_in(page, admin_key(site))
    page.goto(path)
    settled(page)
    return page


def all_pages(browser: Browser, site: Installation, ids: dict[str, str]) -> None:
    """Take a picture of each page in each look."""
    paths = {page.name: page.path.replace("{name}", ids["train-resnet-50"]) for page in PAGES}
    paths |= {"job-failed": f"/jobs/{ids['broken-import']}", "job-waiting": f"/jobs/{ids['llama-finetune']}"}
    paths |= {"jobs-running": "/jobs?state=running,starting,preempting,queued,failed,succeeded"}
    for look, options in LOOKS.items():
        page = opened(browser, site, "/", **{"color_scheme": "light", **options})
        for name, path in paths.items():
            page.goto(path)
            settled(page)
            if name == "nodes":
                page.locator(".toggle").first.click()
            if name == "apps":
                page.select_option("#period", "6")
                page.wait_for_timeout(1_500)
            page.screenshot(path=LOOKED_AT / f"{name}-{look}.png", full_page=True)
        page.context.close()


def kept(browser: Browser, site: Installation, ids: dict[str, str]) -> None:
    """Take the README's two pictures."""
    paths = {"now": ("/", 800), "job": (f"/jobs/{ids['train-resnet-50']}", 1_060)}
    for name, (path, height) in paths.items():
        size = {"width": 1_280, "height": height}
        page = opened(browser, site, path, color_scheme="dark", viewport=size)
        if name == "job":
            expect(page.locator(".badge", has_text="running")).to_have_count(2)  # in its life line, too
            page.wait_for_timeout(700)
        page.screenshot(path=KEPT / f"dashboard-{name}.png")
        page.context.close()


def main() -> int:
    """Start the installation, let it work for so long, take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=6, help="how long there is traffic before the pictures")
    parser.add_argument("--speed", type=float, default=180, help="grid time passes so many times as fast as ours")
    parser.add_argument("--keep", action="store_true", help="take those of docs/pictures, in place of all")
    given = parser.parse_args()
    LOOKED_AT.mkdir(parents=True, exist_ok=True)
    with scratch_folder() as folder:
        env = {"CARBON_REPLAY_SPEED": f"{given.speed:g}", "CARBON_REPLAY_START": "2023-05-01T12:00:00Z"}
        site = Installation(folder / "data", NODES, WATTSHIFT_ZONE="US-CAL-CISO", CARBON_ZONES="US-CAL-CISO,DE", **env)
        site.up()
        try:
            ids = set_up(site, given.minutes)
            with sync_playwright() as playwright, visited(site, given.minutes * 60 + 600):
                time.sleep(given.minutes * 60)
                browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
                (kept if given.keep else all_pages)(browser, site, ids)
                print(json.dumps({name: site.job(each)["state"] for name, each in ids.items()}, indent=1))
        finally:
            site.down()
    return 0


if __name__ == "__main__":
    sys.exit(main())
