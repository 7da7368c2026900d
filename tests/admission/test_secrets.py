"""Secrets of tenants: values go in, and only their names come out."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.contracts.secrets import MAX_SECRET_BYTES
from services.db.sealing import Sealer
from services.kit.starts import START_BYTES
from tests.admission.conftest import admission_on
from tests.admission.installation import Admission, an_entry

KEY = "a-key-that-seals-secrets-in-tests-only"
VALUE = "hunter2-" + "x" * 20


@pytest.fixture(scope="module")
async def admission(
    database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Admission]:
    """Admission with a key for secrets."""
    folder: Path = tmp_path_factory.mktemp("admission")
    async with admission_on(database_url, redis_url, folder, capacity_max_age_s=0.001, secrets_key=KEY) as found:
        yield found


async def put(admission: Admission, name: str, value: Any = VALUE, *, tenant: str = "default", **more: Any) -> Any:
    answer = await admission.ask("PUT", f"/v1/secrets/{name}", tenant=tenant, json={"value": value, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def names(admission: Admission, tenant: str) -> list[tuple[str, str | None, int]]:
    answer = await admission.ask("GET", "/v1/secrets", tenant=tenant)
    return [(item["name"], item["project"], item["version"]) for item in answer.json()["items"]]


async def test_a_secret_is_set_replaced_listed_and_deleted_without_its_value(admission: Admission) -> None:
    tenant = await admission.make_tenant("one")
    first = await put(admission, "TOKEN", tenant=tenant)
    again = await put(admission, "TOKEN", "other", tenant=tenant)
    await put(admission, "TOKEN", tenant=tenant, project="vision")

    assert set(first) == {"name", "project", "version", "created_at", "updated_at"}
    assert (first["version"], again["version"], again["created_at"]) == (1, 2, first["created_at"])
    assert await names(admission, tenant) == [("TOKEN", None, 2), ("TOKEN", "vision", 1)]
    assert (await admission.ask("DELETE", "/v1/secrets/TOKEN?project=vision", tenant=tenant)).status_code == 204
    assert (await admission.ask("DELETE", "/v1/secrets/TOKEN?project=vision", tenant=tenant)).status_code == 404
    assert await names(admission, tenant) == [("TOKEN", None, 2)]


async def test_tenants_have_secrets_of_their_own(admission: Admission) -> None:
    mine, yours = await admission.make_tenant("mine"), await admission.make_tenant("yours")
    await put(admission, "TOKEN", tenant=mine)

    assert await names(admission, yours) == []
    assert (await admission.ask("DELETE", "/v1/secrets/TOKEN", tenant=yours)).status_code == 404
    (answer,) = await admission.submit_all(an_entry({"secrets": [{"name": "TOKEN", "env": "T"}]}, tenant=yours))
    assert answer.status == 422


async def test_the_database_and_the_audit_log_have_no_value(admission: Admission) -> None:
    tenant = await admission.make_tenant("sealed")
    await put(admission, "TOKEN", tenant=tenant)

    row = await admission.database.fetchrow("SELECT project, sealed FROM secrets WHERE tenant_id = $1", tenant)
    audit = await admission.database.fetch("SELECT action, target, data FROM audit_log WHERE tenant_id = $1", tenant)
    assert VALUE.encode() not in row["sealed"]
    assert Sealer(KEY).open(row["sealed"], tenant, "", "TOKEN") == VALUE
    assert [entry["action"] for entry in audit] == ["secret.set"]
    assert VALUE not in str([dict(entry) for entry in audit])


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("TOKEN", json.dumps(VALUE)),
        ("TOKEN", json.dumps([VALUE])),
        ("TOKEN", json.dumps({"value": [VALUE]})),
        ("TOKEN", json.dumps({"value": VALUE, "extra": VALUE})),
        ("TOKEN", json.dumps({"value": VALUE + "\0"})),
        ("TOKEN", json.dumps({"value": VALUE * 4_000})),
        ("TOKEN", json.dumps({"value": VALUE, "project": "-"})),
        ("TOKEN", json.dumps({"valeu": VALUE})),
        ("TOKEN", json.dumps({"value": ""})),
        ("TOKEN", f'{{"value": "{VALUE}\\ud800"}}'),
        ("TOKEN", f'{{"value": "{VALUE}'),
        ("a~b", json.dumps({"value": VALUE})),
    ],
)
async def test_what_is_refused_is_not_repeated_in_the_answer(admission: Admission, name: str, body: str) -> None:
    tenant = f"refused-{abs(hash((name, body)))}"
    await admission.make_tenant(tenant)
    headers = {"content-type": "application/json"}
    answer = await admission.ask("PUT", f"/v1/secrets/{name}", tenant=tenant, content=body, headers=headers)

    assert answer.status_code in (400, 422)
    assert "hunter2" not in answer.text
    assert await names(admission, tenant) == []


async def test_a_job_with_a_missing_secret_is_refused_in_one_line(admission: Admission) -> None:
    tenant = await admission.make_tenant("jobs")
    await put(admission, "THERE", tenant=tenant)
    await put(admission, "NARROW", tenant=tenant, project="vision")
    uses = [{"name": "THERE", "env": "A"}, {"name": "NARROW", "file": "key"}]

    wide, narrow, batch = await admission.submit_all(
        an_entry({"secrets": uses}, tenant=tenant),
        an_entry({"secrets": uses, "project": "vision"}, tenant=tenant),
        an_entry([{"name": "a", "command": ["x"]}, {"name": "b", "command": ["x"], "secrets": uses}], tenant=tenant),
    )

    problem, of_batch = json.loads(wide.body), json.loads(batch.body)
    assert (wide.status, narrow.status, batch.status) == (422, 201, 422)
    assert problem["detail"].startswith("There is no secret NARROW; set it with `wattshift secrets set NARROW`")
    assert [error["pointer"] for error in problem["errors"]] == ["/secrets/1/name"]
    assert [error["pointer"] for error in of_batch["errors"]] == ["/jobs/1/secrets/1/name"]
    assert await admission.count("jobs", f"tenant_id = '{tenant}'") == 1


@pytest.mark.parametrize(("more", "status"), [(0, 201), (1, 422)])
@pytest.mark.parametrize("batch", [False, True])
async def test_secrets_count_for_what_a_program_starts_with(
    admission: Admission, batch: bool, more: int, status: int
) -> None:
    tenant = await admission.make_tenant(f"large-{batch}-{more}")
    whole, of_project = "x" * MAX_SECRET_BYTES, "x" * 1_000
    for number in range(30):
        await put(admission, f"S{number}", whole, tenant=tenant)
    await put(admission, "S29", of_project, tenant=tenant, project="vision")  # this one is the job's, and is shorter
    variables = [{"name": f"S{number}", "env": f"V{number:02}"} for number in range(30)]
    uses = [*variables, {"name": "S0", "file": "not-counted"}]
    taken = 29 * (4 + MAX_SECRET_BYTES + 1 + 8) + 4 + 1_000 + 1 + 8 + len("true") + 1 + 8
    left = START_BYTES - taken + more
    filled = {f"F{number}": "x" * 20_000 for number in range(left // (3 + 20_000 + 1 + 8) - 1)}
    rest = left - len("".join(f"{name}={value}" for name, value in filled.items())) - 9 * len(filled)
    filled["REST"] = "x" * (rest - 5 - 1 - 8)
    spec = {"name": "a", "command": ["true"], "environment": filled, "secrets": uses, "project": "vision"}
    (answer,) = await admission.submit_all(
        an_entry([{"name": "b", "command": ["true"]}, spec] if batch else spec, tenant=tenant)
    )

    assert answer.status == status, answer.body
    if more:
        (error,) = json.loads(answer.body)["errors"]
        assert error["pointer"] == ("/jobs/1/command" if batch else "/command")
        assert error["detail"].startswith("command, environment and secrets have 1,966,081 bytes together")
        assert whole[:50] not in answer.body


async def test_a_repeated_submission_gets_its_answer_though_the_secret_is_gone(admission: Admission) -> None:
    tenant = await admission.make_tenant("repeats")
    await put(admission, "TOKEN", tenant=tenant)
    entry = an_entry({"secrets": [{"name": "TOKEN", "env": "T"}]}, key="once", tenant=tenant)
    (first,) = await admission.submit_all(entry)
    await admission.ask("DELETE", "/v1/secrets/TOKEN", tenant=tenant)
    (again,) = await admission.submit_all(entry)

    assert (first.status, again.status, again.replayed, again.body) == (201, 201, True, first.body)


@pytest.mark.parametrize(
    ("secrets", "named"),
    [
        ([{"name": "A"}], "env"),
        ([{"name": "A", "env": "X", "file": "x"}], "env"),
        ([{"name": "A", "env": "X"}, {"name": "B", "env": "X"}], "variable X is given twice"),
        ([{"name": "A", "env": "PLAIN"}], "variable PLAIN is given twice"),
        ([{"name": "A", "file": "x"}, {"name": "B", "file": "x"}], "file x is given twice"),
        ([{"name": "A", "file": "../x"}], "/secrets/0/file"),
        ([{"name": "A", "file": ".env"}], "/secrets/0/file"),
        ([{"name": "A", "env": "WATTSHIFT_JOB_ID"}], "WATTSHIFT_"),
    ],
)
async def test_uses_that_make_no_sense_are_refused(
    admission: Admission, secrets: list[dict[str, str]], named: str
) -> None:
    (answer,) = await admission.submit_all(an_entry({"secrets": secrets, "environment": {"PLAIN": "1"}}))
    assert answer.status == 422
    assert named in json.loads(answer.body)["detail"]


async def test_a_tenant_has_at_most_a_thousand(admission: Admission) -> None:
    tenant = await admission.make_tenant("many")
    await admission.database.execute(
        "INSERT INTO secrets (tenant_id, project, name, version, sealed) "
        "SELECT $1, '', 's' || n, 1, '' FROM generate_series(1, 1000) n",
        tenant,
    )
    refused = await admission.ask("PUT", "/v1/secrets/one-more", tenant=tenant, json={"value": VALUE})
    replaced = await admission.ask("PUT", "/v1/secrets/s7", tenant=tenant, json={"value": VALUE})

    assert (refused.status_code, refused.json()["code"]) == (403, "quota_exceeded")
    assert replaced.json()["version"] == 2


async def test_without_a_key_no_secret_is_kept(database_url: str, redis_url: str, tmp_path: Path) -> None:
    async with admission_on(database_url, redis_url, tmp_path) as admission:
        answer = await admission.ask("PUT", "/v1/secrets/TOKEN", json={"value": VALUE})

    assert (answer.status_code, answer.json()["code"]) == (409, "capability_missing")
    assert "WATTSHIFT_SECRETS_KEY" in answer.json()["detail"]
