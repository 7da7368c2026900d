"""Tenants, keys and the audit log."""

import hashlib
import json
from datetime import UTC, datetime
from typing import Any

import pytest

from services.contracts.identity import KeyLimits, NewApiKey, ResolvedKey, Role, TenantLimits
from tests.admission.installation import Admission, an_entry


async def _resolve(admission: Admission, secret: str) -> Any:
    lookup = {"key_sha256": hashlib.sha256(secret.encode()).hexdigest()}
    return await admission.ask("POST", "/internal/keys/resolve", json=lookup)


async def _key(admission: Admission, tenant: str = "default", role: Role = Role.USER) -> NewApiKey:
    made = await admission.ask("POST", "/v1/keys", role="admin", json={"tenant_id": tenant, "role": role})
    assert made.status_code == 201, made.text
    return NewApiKey.model_validate_json(made.content)


async def test_a_key_is_told_once_and_stored_hashed(admission: Admission) -> None:
    key = await _key(admission)
    assert key.secret.startswith("ws_")
    listed = (await admission.ask("GET", "/v1/keys", role="admin")).text
    assert key.id in listed
    assert key.secret not in listed
    stored = await admission.database.fetchval("SELECT key_sha256 FROM api_keys WHERE id = $1", key.id)
    assert stored == hashlib.sha256(key.secret.encode()).digest()


async def test_a_key_resolves_to_its_owner_until_it_is_revoked(admission: Admission) -> None:
    tenant = await admission.make_tenant("resolves", max_gpus=4)
    key = await _key(admission, tenant, Role.OPERATOR)
    found = ResolvedKey.model_validate_json((await _resolve(admission, key.secret)).content)
    assert (found.identity.tenant_id, found.identity.role, found.identity.key_id) == (tenant, "operator", key.id)
    assert found.limits == TenantLimits(max_gpus=4)
    for _ in range(2):
        assert (await admission.ask("DELETE", f"/v1/keys/{key.id}", role="admin")).status_code == 204
    assert (await _resolve(admission, key.secret)).status_code == 404
    assert (await _resolve(admission, "ws_" + "x" * 43)).status_code == 404


async def test_limits_of_a_key_are_set_changed_resolved_and_passed_on_to_its_successor(admission: Admission) -> None:
    limits = {"models": ["llama"], "aliases": {"gpt-4o": {"llama": 9.0, "next": 1.0}}, "requests_per_min": 60}
    body = {"tenant_id": "default", "limits": limits}
    made = (await admission.ask("POST", "/v1/keys", role="admin", json=body)).json()
    path = f"/v1/keys/{made['id']}"
    change = {"limits": {"requests_per_min": None, "month_gco2": 5.0}}
    changed = (await admission.ask("PATCH", path, role="admin", json=change)).json()
    expected = KeyLimits(models=["llama"], aliases={"gpt-4o": {"llama": 9.0, "next": 1.0}}, month_gco2=5.0)
    assert (KeyLimits.model_validate(changed["limits"]), changed["expires_at"]) == (expected, None)
    by_id = await admission.ask("POST", "/internal/keys/resolve", json={"key_id": made["id"]})
    for answer in (await _resolve(admission, made["secret"]), by_id):
        assert ResolvedKey.model_validate_json(answer.content).key_limits == expected
    successor = (await admission.ask("POST", f"{path}/rotate", role="admin", json={})).json()
    assert KeyLimits.model_validate(successor["limits"]) == expected
    plain = await _resolve(admission, (await _key(admission)).secret)
    assert set(plain.json()) == {"identity", "limits", "expires_at"}, "older routers know no more"
    for bad in ({}, {"limits": {}}, {"limits": {"aliases": {"a": {}}}}, {"limits": {"requests_per_min": 0}}):
        assert (await admission.ask("PATCH", path, role="admin", json=bad)).status_code == 422
    both = {"key_id": "key_1", "key_sha256": "0" * 64}
    assert (await admission.ask("POST", "/internal/keys/resolve", json=both)).status_code == 422


ENDS = {
    "revoked": "UPDATE api_keys SET revoked_at = now() WHERE id = $1",
    "expired": "UPDATE api_keys SET expires_at = now() WHERE id = $1",
    "disabled": "UPDATE users u SET disabled_at = now() FROM api_keys k WHERE k.user_id = u.id AND k.id = $1",
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("is_replaced", [False, True])
async def test_what_a_key_asked_for_is_limited_though_it_no_longer_works(
    admission: Admission, end: str, is_replaced: bool
) -> None:
    """Lines of its batches may still be answered, by its own limits or those of its successor."""
    tenant = await admission.make_tenant(f"ended-{end}-{is_replaced}".lower())
    await admission.ask("POST", f"/v1/tenants/{tenant}/users", role="admin", json={"name": "ada"})
    body = {"tenant_id": tenant, "user": "ada", "limits": {"models": ["small"], "month_tokens": 100}}
    made = NewApiKey.model_validate_json((await admission.ask("POST", "/v1/keys", role="admin", json=body)).content)
    used = {"tokens": 100, "gco2": 0, "cost": 0, "month": f"{datetime.now(UTC):%Y-%m}"}
    limits, last = made.limits, made.id
    for _ in range(2 if is_replaced else 0):
        body = (await admission.ask("POST", f"/v1/keys/{last}/rotate", role="admin", json={"overlap_s": 60})).json()
        last, change = body["id"], {"limits": {"models": ["small", "large"]}}
        changed = await admission.ask("PATCH", f"/v1/keys/{last}", role="admin", json=change)
        limits = KeyLimits.model_validate(changed.json()["limits"])
    await admission.database.execute("UPDATE api_keys SET used = $2 WHERE id = $1", last, json.dumps(used))
    await admission.database.execute(ENDS[end], made.id)

    assert (await _resolve(admission, made.secret)).status_code == 404
    found = await admission.ask("POST", "/internal/keys/resolve", json={"key_id": made.id})
    key = ResolvedKey.model_validate_json(found.content)
    assert (key.identity.key_id, key.key_limits) == (made.id, limits)
    assert key.excess is not None
    assert key.expires_at is not None
    assert key.expires_at <= datetime.now(UTC)


async def test_the_last_admin_key_stays(admission: Admission) -> None:
    await admission.database.execute("UPDATE api_keys SET revoked_at = now() WHERE role = 'admin' AND label = ''")
    (first_id,) = [
        row["id"]
        for row in await admission.database.fetch("SELECT id FROM api_keys WHERE role = 'admin' AND revoked_at IS NULL")
    ]
    refused = await admission.ask("DELETE", f"/v1/keys/{first_id}", role="admin")
    assert (refused.status_code, refused.json()["code"]) == (409, "conflict")
    second = await _key(admission, role=Role.ADMIN)
    assert (await admission.ask("DELETE", f"/v1/keys/{second.id}", role="admin")).status_code == 204


async def test_limits_change_one_by_one(admission: Admission) -> None:
    tenant = await admission.make_tenant("limits", max_gpus=8, burst=5)
    path = f"/v1/tenants/{tenant}"
    answer = await admission.ask(
        "PATCH", path, role="admin", json={"limits": {"max_gpus": None, "requests_per_s": 1.5, "share_weight": 3}}
    )
    assert answer.json()["limits"] == TenantLimits(requests_per_s=1.5, burst=5, share_weight=3).model_dump()
    assert (await admission.ask("GET", path, role="operator")).json() == answer.json()
    assert answer.json() in (await admission.ask("GET", "/v1/tenants", role="operator")).json()["items"]


@pytest.mark.parametrize("change", [{"guaranteed_gpus": 9}, {"max_gpus": 3}, {"guaranteed_gpus": 2, "max_gpus": 1}])
async def test_no_more_is_guaranteed_than_may_be_held_unless_it_was_so(
    admission: Admission, change: dict[str, int]
) -> None:
    tenant = await admission.make_tenant(f"g{len(change)}-{min(change.values())}", guaranteed_gpus=4, max_gpus=8)
    path, admin = f"/v1/tenants/{tenant}", {"role": "admin"}
    before = (await admission.ask("GET", path, **admin)).json()

    refused = await admission.ask("PATCH", path, **admin, json={"limits": change})
    made = await admission.ask(
        "POST", "/v1/tenants", **admin, json={"id": "new", "limits": {"max_gpus": 0, **change, "guaranteed_gpus": 9}}
    )

    for answer in (refused, made):
        assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, "/limits/guaranteed_gpus")
    assert (await admission.ask("GET", path, **admin)).json() == before
    old = {**before["limits"], "guaranteed_gpus": 20}
    await admission.database.fetch("UPDATE tenants SET limits = $2 WHERE id = $1 RETURNING 1", tenant, json.dumps(old))
    kept = await admission.ask("PATCH", path, **admin, json={"limits": {"burst": 7}})
    assert (kept.status_code, kept.json()["limits"]) == (200, {**old, "burst": 7})


async def test_a_tenant_is_made_once(admission: Admission) -> None:
    await admission.make_tenant("twice")
    again = await admission.ask("POST", "/v1/tenants", role="admin", json={"id": "twice"})
    assert (again.status_code, again.json()["code"]) == (409, "conflict")
    assert again.json()["errors"][0]["pointer"] == "/id"


async def test_a_key_needs_its_tenant(admission: Admission) -> None:
    answer = await admission.ask("POST", "/v1/keys", role="admin", json={"tenant_id": "no-such-tenant"})
    assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, "/tenant_id")


@pytest.mark.parametrize(
    ("method", "path", "least"),
    [
        ("POST", "/v1/tenants", "admin"),
        ("GET", "/v1/tenants", "operator"),
        ("GET", "/v1/tenants/default", "operator"),
        ("PATCH", "/v1/tenants/default", "admin"),
        ("POST", "/v1/keys", "admin"),
        ("GET", "/v1/keys", "admin"),
        ("DELETE", "/v1/keys/key_00000000000000000000000000", "admin"),
        ("GET", "/v1/audit", "operator"),
    ],
)
async def test_roles(admission: Admission, method: str, path: str, least: str) -> None:
    roles = ["user", "operator", "admin"]
    for role in roles:
        answer = await admission.ask(method, path, role=role, json={} if method in ("POST", "PATCH") else None)
        assert (answer.status_code == 403) == (roles.index(role) < roles.index(least)), (role, answer.text)


# Encoded, as a client resolves plain dots itself and would ask for another path.
@pytest.mark.parametrize("path", ["/v1/tenants/a%00b", "/v1/tenants/%2e%2e", f"/v1/tenants/{'x' * 2000}"])
async def test_a_name_no_tenant_can_have(admission: Admission, path: str) -> None:
    assert (await admission.ask("GET", path, role="admin")).status_code == 404


async def test_lists_have_pages(admission: Admission) -> None:
    for path, field in (("/v1/tenants", "id"), ("/v1/keys", "id"), ("/v1/audit", "at")):
        whole = (await admission.ask("GET", path, role="admin", params={"limit": 500})).json()["items"]
        found: list[Any] = []
        cursor = None
        while not found or cursor:
            params = {"limit": 2} | ({"cursor": cursor} if cursor else {})
            page = (await admission.ask("GET", path, role="admin", params=params)).json()
            found, cursor = found + page["items"], page["next_cursor"]
        assert [item[field] for item in found] == [item[field] for item in whole]
        bad = await admission.ask("GET", path, role="admin", params={"cursor": "Zm9vIGJhcg"})
        assert (bad.status_code, bad.json()["code"]) == (422, "invalid_cursor")


async def test_a_cursor_is_of_one_list_and_one_tenant(admission: Admission) -> None:
    """Taken for another's position, it would leave out rows without a word."""
    tenants = [await admission.make_tenant(name) for name in ("paged-a", "paged-b")]
    for tenant in tenants:
        for name in ("ada", "bo"):
            await admission.ask("POST", f"/v1/tenants/{tenant}/users", role="admin", json={"name": name})
            await admission.submit({"name": name}, tenant=tenant)
    asked = [
        ("/v1/tenants", "admin", "default"),
        *((f"/v1/tenants/{tenant}/users", "admin", "default") for tenant in tenants),
        *(("/v1/jobs", "user", tenant) for tenant in tenants),
    ]
    for path, role, tenant in asked:
        page = (await admission.ask("GET", path, role=role, tenant=tenant, params={"limit": 1})).json()
        for other, as_role, whose in asked:
            params = {"cursor": page["next_cursor"]}
            answer = await admission.ask("GET", other, role=as_role, tenant=whose, params=params)
            if (path, tenant) == (other, whose):
                assert answer.status_code == 200, answer.text
            else:
                assert (answer.status_code, answer.json()["code"]) == (422, "invalid_cursor"), (path, other)


async def test_what_admins_do_is_written_down(admission: Admission) -> None:
    tenant = await admission.make_tenant("written")
    key = await _key(admission, tenant)
    await admission.ask("PATCH", f"/v1/tenants/{tenant}", role="admin", json={"limits": {"burst": 7}})
    await admission.ask("DELETE", f"/v1/keys/{key.id}", role="admin")
    audit = (await admission.ask("GET", "/v1/audit", role="operator")).json()["items"]
    assert [(entry["action"], entry["target"]) for entry in audit[:4]] == [
        ("key.revoked", key.id),
        ("tenant.changed", tenant),
        ("key.created", key.id),
        ("tenant.created", tenant),
    ]
    assert audit[1]["data"]["after"]["burst"] == 7
    assert key.secret not in str(audit)


async def test_only_services_come_in(admission: Admission) -> None:
    answer = await admission.ask("GET", "/v1/jobs", headers={"authorization": "Bearer wrong"})
    assert (answer.status_code, answer.json()["code"]) == (401, "unauthenticated")
    answer = await admission.http.get("/v1/jobs")
    assert answer.status_code == 401


async def test_a_key_expires_and_shows_its_last_use(admission: Admission) -> None:
    spec = {"tenant_id": "default", "expires_at": "2099-01-01T00:00:00Z"}
    key = NewApiKey.model_validate_json((await admission.ask("POST", "/v1/keys", role="admin", json=spec)).content)
    unused = await admission.ask("GET", "/v1/keys", role="admin")
    assert next(found for found in unused.json()["items"] if found["id"] == key.id)["last_used_at"] is None
    resolved = ResolvedKey.model_validate_json((await _resolve(admission, key.secret)).content)
    assert resolved.expires_at == key.expires_at
    first = await admission.database.fetchval("SELECT last_used_at FROM api_keys WHERE id = $1", key.id)
    await _resolve(admission, key.secret)
    assert first is not None
    assert await admission.database.fetchval("SELECT last_used_at FROM api_keys WHERE id = $1", key.id) == first
    past = {"expires_at": "2020-01-01T00:00:00Z"}
    assert (await admission.ask("PATCH", f"/v1/keys/{key.id}", role="admin", json=past)).status_code == 200
    assert (await _resolve(admission, key.secret)).status_code == 404
    again = await admission.ask("PATCH", f"/v1/keys/{key.id}", role="admin", json={"expires_at": None})
    assert (again.status_code, again.json()["code"]) == (409, "conflict"), "what has ended does not begin again"
    assert (await admission.ask("PATCH", "/v1/keys/key_none", role="admin", json=past)).status_code == 404


async def test_a_rotated_key_works_for_the_overlap_only(admission: Admission) -> None:
    old = await _key(admission, role=Role.OPERATOR)
    path = f"/v1/keys/{old.id}/rotate"
    new = NewApiKey.model_validate_json(
        (await admission.ask("POST", path, role="admin", json={"overlap_s": 600})).content
    )
    assert (new.role, new.tenant_id, new.label) == (old.role, old.tenant_id, old.label)
    for secret in (old.secret, new.secret):
        assert (await _resolve(admission, secret)).status_code == 200
    newest = (await admission.ask("POST", f"/v1/keys/{new.id}/rotate", role="admin", json={})).json()
    assert (await _resolve(admission, new.secret)).status_code == 404
    assert (await _resolve(admission, newest["secret"])).status_code == 200
    refused = await admission.ask("POST", f"/v1/keys/{new.id}/rotate", role="admin", json={})
    assert refused.status_code == 409
    asked = {"action": "key.rot", "since": "2020-01-01T00:00:00Z"}
    log = (await admission.ask("GET", "/v1/audit", role="operator", params=asked)).json()["items"]
    assert [entry["target"] for entry in log][:2] == [new.id, old.id]
    assert (await admission.ask("GET", "/v1/audit", role="operator", params={"until": asked["since"]})).json()[
        "items"
    ] == []


async def test_some_admin_key_always_lasts(admission: Admission) -> None:
    await admission.database.execute("UPDATE api_keys SET revoked_at = now() WHERE role = 'admin'")
    only = await _key(admission, role=Role.ADMIN)
    path, change = f"/v1/keys/{only.id}", {"expires_at": "2099-01-01T00:00:00Z"}
    refused = await admission.ask("PATCH", path, role="admin", json=change)
    assert (refused.status_code, refused.json()["detail"].startswith("No other admin key would last")) == (409, True)
    refused = await admission.ask("POST", f"{path}/rotate", role="admin", json=change)
    assert (refused.status_code, refused.json()["detail"].startswith("No other admin key would last")) == (409, True)
    await _key(admission, role=Role.ADMIN)
    assert (await admission.ask("PATCH", path, role="admin", json=change)).status_code == 200


async def test_a_read_only_caller_reads_and_changes_nothing(admission: Admission) -> None:
    assert (await admission.ask("GET", "/v1/jobs", role="read_only")).status_code == 200
    (made,) = await admission.submit_all(an_entry())
    job_id = json.loads(made.body)["id"]
    refused = await admission.ask("POST", f"/v1/jobs/{job_id}/cancel", role="read_only")
    assert (refused.status_code, refused.json()["detail"]) == (403, "This API key is read-only.")
    assert (await admission.ask("GET", "/v1/tenants", role="read_only")).status_code == 403
