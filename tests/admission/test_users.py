"""Users: their keys, their accounts, and the jobs they submit."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from services.admission.first_start import ensure_first_admin
from services.contracts.identity import NewApiKey, ResolvedKey
from services.db.engine import create_engine
from tests.admission.installation import Admission, an_entry
from tests.support.servers import fresh_database

USERS = "/v1/tenants/default/users"


async def _user(admission: Admission, name: str, account: str | None = None) -> dict[str, Any]:
    made = await admission.ask("POST", USERS, role="admin", json={"name": name, "account": account})
    assert made.status_code == 201, made.text
    return made.json()


async def _key(admission: Admission, **spec: Any) -> NewApiKey:
    made = await admission.ask("POST", "/v1/keys", role="admin", json={"tenant_id": "default", **spec})
    assert made.status_code == 201, made.text
    return NewApiKey.model_validate_json(made.content)


async def _identity(admission: Admission, key: NewApiKey) -> Any:
    lookup = {"key_sha256": hashlib.sha256(key.secret.encode()).hexdigest()}
    answer = await admission.ask("POST", "/internal/keys/resolve", json=lookup)
    return ResolvedKey.model_validate_json(answer.content).identity if answer.status_code == 200 else None


async def _change(admission: Admission, name: str, **change: Any) -> Any:
    return await admission.ask("PATCH", f"{USERS}/{name}", role="admin", json=change)


async def test_a_user_is_created_once_listed_and_changed(admission: Admission) -> None:
    made = await _user(admission, "ada", "ada_l")
    again = await admission.ask("POST", USERS, role="admin", json={"name": "ada"})
    changed = await _change(admission, "ada", account="ada")
    listed = (await admission.ask("GET", USERS, role="operator")).json()["items"]

    assert (again.status_code, again.json()["errors"][0]["pointer"]) == (409, "/name")
    assert changed.json() == {**made, "account": "ada"}
    assert (await admission.ask("GET", f"{USERS}/ada", role="operator")).json() == changed.json()
    assert changed.json() in listed


@pytest.mark.parametrize("account", ["", "a b", "-x", "a/b", "a" * 65, "0day", "a\n"])
async def test_what_is_no_account_is_refused(admission: Admission, account: str) -> None:
    refused = await admission.ask("POST", USERS, role="admin", json={"name": "odd", "account": account})
    assert (refused.status_code, refused.json()["errors"][0]["pointer"]) == (422, "/account")


async def test_keys_of_a_disabled_user_resolve_to_nobody_until_the_user_is_enabled(admission: Admission) -> None:
    user = await _user(admission, "bob")
    key, other = await _key(admission, user="bob"), await _key(admission)
    found = await _identity(admission, key)
    assert (found.user_id, found.project) == (user["id"], None)
    disabled = (await _change(admission, "bob", disabled=True)).json()
    assert disabled["disabled_at"] is not None
    assert await _identity(admission, key) is None
    assert (await _identity(admission, other)).user_id is None
    refused = await admission.ask("POST", "/v1/keys", role="admin", json={"tenant_id": "default", "user": "bob"})
    assert (refused.status_code, refused.json()["errors"][0]["pointer"]) == (422, "/user")
    assert (await _change(admission, "bob", disabled=True)).json() == disabled, "a second time changes nothing"
    assert (await _change(admission, "bob", disabled=False)).json()["disabled_at"] is None
    assert (await _identity(admission, key)).user_id == user["id"]


async def test_a_key_of_a_disabled_user_can_still_be_revoked(admission: Admission) -> None:
    await _user(admission, "carl")
    key = await _key(admission, user="carl")
    await _change(admission, "carl", disabled=True)
    assert (await admission.ask("DELETE", f"/v1/keys/{key.id}", role="admin")).status_code == 204
    await _change(admission, "carl", disabled=False)
    assert await _identity(admission, key) is None


async def test_a_rotated_key_keeps_its_user_and_its_project(admission: Admission) -> None:
    user = await _user(admission, "dora")
    key = await _key(admission, user="dora", project="birds", role="read_only")
    rotated = await admission.ask("POST", f"/v1/keys/{key.id}/rotate", role="admin", json={})
    found = await _identity(admission, NewApiKey.model_validate_json(rotated.content))
    assert (found.user_id, found.project, found.role) == (user["id"], "birds", "read_only")
    assert await _identity(admission, key) is None


async def test_no_user_has_the_account_of_root(admission: Admission) -> None:
    users = "/v1/tenants/default/users"
    refused = await admission.ask("POST", users, role="admin", json={"name": "erin", "account": "root"})
    await _user(admission, "finn")
    await _key(admission, user="finn", role="admin")
    turned = await _change(admission, "finn", account="root")

    for answer in (refused, turned):
        assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, "/account")


async def test_the_user_of_the_last_admin_key_is_not_disabled_even_by_two_at_once(admission: Admission) -> None:
    await admission.database.execute("UPDATE api_keys SET revoked_at = now() WHERE role = 'admin' AND label = ''")
    first = await admission.database.fetch("SELECT id FROM api_keys WHERE role = 'admin' AND revoked_at IS NULL")
    for name in ("gina", "hugo"):
        await _user(admission, name)
        await _key(admission, user=name, role="admin")
    await admission.database.execute("UPDATE api_keys SET revoked_at = now() WHERE id = $1", first[0]["id"])
    try:
        answers = await asyncio.gather(*(_change(admission, name, disabled=True) for name in ("gina", "hugo")))
        assert sorted(answer.status_code for answer in answers) == [200, 409]
    finally:
        await admission.database.execute("UPDATE api_keys SET revoked_at = NULL WHERE id = $1", first[0]["id"])


async def test_a_key_of_a_project_is_no_operators(admission: Admission) -> None:
    spec = {"tenant_id": "default", "role": "operator", "project": "birds"}
    refused = await admission.ask("POST", "/v1/keys", role="admin", json=spec)
    assert (refused.status_code, refused.json()["errors"][0]["pointer"]) == (422, "/project")


async def test_a_job_remembers_its_user_and_older_jobs_are_found_by_their_label(admission: Admission) -> None:
    tenant = await admission.make_tenant("minds")
    await admission.ask("POST", f"/v1/tenants/{tenant}/users", role="admin", json={"name": "ida"})
    user = await admission.database.fetchval("SELECT id FROM users WHERE tenant_id = $1", tenant)
    entry = an_entry({"labels": {"user": "somebody"}}, tenant=tenant)
    await admission.submit_all(entry.model_copy(update={"user_id": user}))
    await admission.submit({"labels": {"user": "ida"}}, tenant=tenant)
    await admission.submit({"labels": {"user": "somebody"}}, tenant=tenant)

    async def listed(user: str) -> list[tuple[str | None, str]]:
        items = (await admission.ask("GET", "/v1/jobs", tenant=tenant, params={"user": user})).json()["items"]
        return [(job["user"], job["spec"]["labels"]["user"]) for job in items]

    assert await listed("ida") == [(None, "ida"), ("ida", "somebody")]
    assert await listed("somebody") == [(None, "somebody")]


async def test_a_caller_learns_who_it_is(admission: Admission) -> None:
    user = await _user(admission, "jane", "jane_d")
    caller = {"user_id": user["id"], "project": "birds"}
    known = (await admission.ask("GET", "/v1/whoami", caller=caller)).json()
    unknown = (await admission.ask("GET", "/v1/whoami")).json()

    assert (known["user"], known["account"], known["project"]) == ("jane", "jane_d", "birds")
    assert (unknown["user"], unknown["account"], unknown["project"]) == (None, None, None)


async def test_the_first_key_belongs_to_the_account_that_started_the_installation(
    postgres_url: str, tmp_path: Path
) -> None:
    engine = create_engine(fresh_database(postgres_url))
    owner = "SELECT u.name, u.account FROM api_keys k LEFT JOIN users u ON u.id = k.user_id"
    try:
        await ensure_first_admin(engine, tmp_path)
        found = []
        for account in ("", "ada", "somebody_else"):
            await ensure_first_admin(engine, tmp_path, account)
            async with engine.connect() as connection:
                found.append([tuple(row) for row in await connection.exec_driver_sql(owner)])
    finally:
        await engine.dispose()
    assert found == [[(None, None)], [("ada", "ada")], [("ada", "ada")]]


async def test_submissions_of_a_project_key_are_of_its_project(admission: Admission) -> None:
    def entry(key: str, **spec: Any) -> Any:
        return an_entry(spec, key=key).model_copy(update={"project": "birds"})

    default, other = await admission.submit_all(entry("default"), entry("other", project="fish"))
    job = json.loads(default.body)["id"]

    assert await admission.database.fetchval("SELECT project FROM jobs WHERE id = $1", job) == "birds"
    assert (other.status, json.loads(other.body)["errors"][0]["pointer"]) == (403, "/project")
    again = an_entry({}, key="default").model_copy(update={"project": "fish"})
    (answer,) = await admission.submit_all(again)
    assert (answer.status, json.loads(answer.body)["code"]) == (422, "idempotency_key_reused")


async def test_a_command_runs_in_the_job_of_another_user_for_operators_only(admission: Admission) -> None:
    made = {name: await _user(admission, name, account) for name, account in (("kim", "kim_k"), ("lou", "lou_l"))}
    (answer,) = await admission.submit_all(an_entry().model_copy(update={"user_id": made["kim"]["id"]}))
    job = json.loads(answer.body)["id"]
    await admission.add_node("exec-node", "A100")
    waiting = await admission.ask("POST", f"/v1/jobs/{job}/files", role="operator", json={"path": "x"})
    assert (waiting.status_code, "has never run" in waiting.json()["detail"]) == (409, True)
    await admission.start(job, node="exec-node")

    async def status(what: str, role: str = "user", **caller: str) -> int:
        asked = {"command": ["id"]} if what == "exec" else {"path": "results"}
        answer = await admission.ask("POST", f"/v1/jobs/{job}/{what}", role=role, caller=caller, json=asked)
        return answer.status_code

    assert await status("files", user_id=made["kim"]["id"]) == 409, "it runs"
    for what in ("exec", "files"):
        assert await status(what, user_id=made["lou"]["id"]) == 403
        assert await status(what) == 403
        assert await status(what, user_id=made["kim"]["id"]) == 503, "the node of this test does not answer"
        assert await status(what, role="operator") == 503
        await admission.end(job)
        assert await status("exec", user_id=made["kim"]["id"]) == 409
