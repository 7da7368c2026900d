"""Signing in and out, and what a session may see."""

from __future__ import annotations

import httpx
from playwright.sync_api import expect

from tests.browser.conftest import OpenPage
from tests.integration.conftest import Installation
from tests.support.servers import wait_until


def test_the_page_says_where_the_first_key_is(open_page: OpenPage) -> None:
    expect(open_page("/", key="").locator(".hint")).to_contain_text("admin.key")


def test_a_wrong_key_is_said_to_be_one(open_page: OpenPage) -> None:
    page = open_page("/", key="")
    page.get_by_label("API key").fill("ws_wrong")
    page.get_by_role("button", name="Sign in", exact=True).click()

    expect(page.get_by_role("alert")).to_have_text("This API key is not valid.")
    expect(page.get_by_label("API key")).to_be_focused()


def test_signing_out_ends_the_session(open_page: OpenPage) -> None:
    page = open_page("/jobs")
    expect(page.get_by_role("heading", name="Jobs", exact=True)).to_be_visible()
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("API key")).to_be_visible()

    page.goto("/jobs")
    expect(page.get_by_label("API key")).to_be_visible()
    assert page.context.cookies() == []


def test_a_revoked_key_ends_its_sessions(open_page: OpenPage, site: Installation) -> None:
    made = site.gateway.call("POST", "/v1/keys", body={"tenant_id": "default", "label": "soon revoked"})
    page = open_page("/jobs", key=made["secret"])
    expect(page.locator("#live")).to_be_visible()
    page.goto("about:blank")  # an open page would notice by itself, and end the session before the next one asks
    site.gateway.call("DELETE", f"/v1/keys/{made['id']}")

    with httpx.Client(base_url=site.gateway.url, headers={"authorization": f"Bearer {made['secret']}"}) as client:
        wait_until(lambda: client.get("/v1/jobs").status_code == 401)  # within GATEWAY_KEY_MAX_AGE_S
    page.goto("/")
    expect(page.get_by_role("alert")).to_have_text("Your API key is no longer valid.")


def test_users_see_no_pages_of_operators(open_page: OpenPage, site: Installation) -> None:
    made = site.gateway.call("POST", "/v1/keys", body={"tenant_id": "default", "role": "read_only"})
    page = open_page("/", key=made["secret"])

    expect(page.locator("#power")).to_be_hidden()  # of the cluster, which operators see
    links = page.get_by_role("navigation", name="Pages").get_by_role("link")
    assert links.all_inner_texts() == ["Now", "Jobs", "Pools", "Apps", "Policies", "Reports"]
    page.goto("/nodes")
    expect(page.locator("#main")).to_contain_text("This page is for operators.")
    page.goto("/jobs")
    expect(page.get_by_role("link", name="Submit a job")).to_have_count(0)


def test_one_returns_to_the_page_that_asked(open_page: OpenPage, site: Installation) -> None:
    page = open_page("/reports", key="")
    page.get_by_label("API key").fill((site.folder / "admin.key").read_text().strip())
    page.get_by_role("button", name="Sign in", exact=True).click()

    expect(page.get_by_role("heading", name="Reports")).to_be_visible()


def test_a_theme_is_chosen_and_kept(open_page: OpenPage) -> None:
    page = open_page("/", color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    page.locator("#theme").click()
    assert page.evaluate(background) != dark
    page.goto("/policies")
    assert page.evaluate(background) != dark
    page.locator("#theme").click()
    assert page.evaluate(background) == dark
