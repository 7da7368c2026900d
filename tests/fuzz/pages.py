"""What the dashboard shows after a walk, against what the API's lists and reports say at the same moment."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from playwright.async_api import Page, async_playwright

from tests.fuzz.asking import WITHIN_S, bearer

GROUPS = ("project", "user", "tenant", "job", "model", "zone", "node", "day", "week", "month")
FIGURES = ("carbon_gco2", "baseline_gco2", "energy_j", "gpu_s")
TABLE = """name => [...document.querySelectorAll(`${name} tbody tr`)].map((row) =>
  [...row.cells].map((cell) => cell.querySelector("data")?.value ?? cell.innerText.trim()))"""


async def pages_agree(gateway_url: str, key: str) -> None:
    """Hold that pages show what the API says, to the digits that both have; nothing may go on meanwhile."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no Chromium here")
    async with async_playwright() as playwright, httpx.AsyncClient(base_url=gateway_url, headers=bearer(key)) as http:
        browser = await playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox"] if os.geteuid() == 0 else []
        )
        page = await (await browser.new_context(base_url=gateway_url, timezone_id="UTC", locale="en-GB")).new_page()
        page.set_default_timeout(1_000 * WITHIN_S)
        await page.goto("/")
        await page.get_by_label("API key").fill(key)
        await page.get_by_role("button", name="Sign in", exact=True).click()
        pages = Pages(page, http)
        await pages.now()
        for group in GROUPS:
            await pages.report(group)
        await pages.tenants()
        await pages.nodes()
        await browser.close()


class Pages:
    """One browser's page, and a client of the API with the same key."""

    def __init__(self, page: Page, http: httpx.AsyncClient) -> None:
        self.page, self.http = page, http

    async def get(self, path: str, **query: Any) -> Any:
        answer = await self.http.get(path, params=query)
        assert answer.is_success, (path, answer.text)
        return answer.json()

    async def rows(self, name: str) -> list[list[str]]:
        await self.page.locator(f"{name} tbody tr").first.wait_for()
        return await self.page.evaluate(TABLE, name)

    async def value(self, name: str) -> float:
        return float(await self.page.locator(name).get_attribute("value") or "nan")

    async def now(self) -> None:
        today = {"group_by": "day", "start": f"{datetime.now(UTC):%Y-%m-%d}T00:00:00Z"}
        before = (await self.get("/v1/reports/footprint", **today))["total"]["carbon_gco2"]
        await self.page.goto("/")
        shown = await self.value("#carbon-today")
        after = (await self.get("/v1/reports/footprint", **today))["total"]["carbon_gco2"]
        assert before * 0.999999 <= shown <= after * 1.000001
        counts = await self.get("/v1/jobs:counts")
        shown = [await self.value(f"#count-{name}") for name in ("running", "waiting", "held")]
        runs = sum(counts[state] for state in ("starting", "running", "preempting"))
        assert shown == [runs, counts["queued"], counts["held"]]
        nodes = [each for each in (await self.get("/v1/nodes", limit=500))["items"] if each["state"] != "lost"]
        used, of = (sum(each[name] for each in nodes) for name in ("gpus_in_use", "gpus"))
        await self.page.get_by_text(f"{used} of {of} GPUs in use").wait_for()
        assert await self.value("#power-now") == pytest.approx(sum(each["power_w"] for each in nodes), rel=0.01)

    async def report(self, group: str) -> None:
        start = f"{datetime.now(UTC):%Y-%m}-01T00:00:00Z"
        told = await self.get("/v1/reports/footprint", group_by=group, start=start, limit=100)
        for _ in range(20):  # until nobody has sent energy meanwhile
            before = told
            await self.page.goto(f"/reports?period=month&group={group}")
            rows = await self.rows("#groups")
            told = await self.get("/v1/reports/footprint", group_by=group, start=start, limit=100)
            if before["total"] == told["total"]:
                break
        else:
            raise AssertionError("the ledger never rests")
        figures = [each for each in rows if len(each) > 1]
        expected = [{**each["footprint"], **each["accounts"]} for each in told["lines"]]
        expected += [{**told[name], **told[f"{name}_accounts"]} for name in ("idle", "total")]
        assert len(figures) == len(expected), (group, rows)
        for row, each in zip(figures, expected, strict=True):
            self.same((row[1], row[3], row[4], row[5]), [each[name] for name in FIGURES], (group, row))
        if told["next_cursor"] is None:
            for at, name in ((1, "carbon_gco2"), (4, "energy_j"), (5, "gpu_s")):
                *parts, total = (float(row[at]) for row in figures)
                assert sum(parts) == pytest.approx(total, rel=1e-6), (group, name)

    async def tenants(self) -> None:
        await self.page.goto("/admin")
        shown = {row[0]: row[1:4] for row in await self.rows("#tenants")}
        shares = {each["tenant_id"]: each for each in (await self.get("/v1/shares"))["items"]}
        for tenant in (await self.get("/v1/tenants", limit=500))["items"]:
            share = shares.get(tenant["id"], {})
            expected = [tenant["limits"]["guaranteed_gpus"], share.get("gpus", 0), share.get("borrowed_gpus", 0)]
            assert shown[tenant["id"]] == [str(each) for each in expected], (tenant, share)

    async def nodes(self) -> None:
        for node in [each for each in (await self.get("/v1/nodes", limit=500))["items"] if each["devices"]]:
            await self.page.goto(f"/nodes#{node['id']}")
            await self.page.reload()
            lines = self.page.locator(f"[id='{node['id']}'] .node-details tbody tr")
            await lines.first.wait_for()
            assert await lines.count() == len(node["devices"]), node

    @staticmethod
    def same(shown: Sequence[str], expected: Sequence[float | None], about: Any) -> None:
        for text, value in zip(shown, expected, strict=True):
            if value is None:
                assert text.startswith("unknown"), about
            else:
                assert float(text) == pytest.approx(value, rel=1e-6, abs=1e-9), about
