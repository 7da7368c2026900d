"""The routers' table, and the endpoints of others, as routers and operators see them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.contracts.identity import Role
from services.contracts.routing import Endpoint, RoutingTable, UpstreamKeys
from services.contracts.serving import InstanceState
from services.core.domain.serving import LatencyLimits, MiadConfig
from services.db.sealing import Sealer, new_instance_key
from services.serving.controller.advance import Seen, advance
from services.serving.settings import ServingSettings
from tests.serving.test_advance import DRAINING, NOW, PROBES
from tests.support.pools import SECRETS_KEY, PoolApi, a_partition, pool_api
from tests.support.services import TOKEN


@pytest.fixture(scope="module")
async def api(database_url: str) -> AsyncIterator[PoolApi]:
    async with pool_api(database_url) as made:
        yield made


def an_endpoint(**more: Any) -> dict[str, Any]:
    return {"url": "http://10.8.0.7:8000", "models": ["llama"], "location": "lab", **more}


async def table(api: PoolApi) -> RoutingTable:
    api.routing.forget()
    return RoutingTable.model_validate_json((await api.call("GET", "/internal/routing")).content)


async def add_instance(api: PoolApi, pool: str, name: str, state: str = "ready", **columns: Any) -> None:
    terms = {"mode": {"name": "one", "gpu_model": "A100", "gpus": 1, "command": ["serve"]}}
    terms |= {"place": {"name": "here", "zone": "DE"}, "probes": {}}
    await api.database.execute(
        "INSERT INTO pool_instances (id, pool, tenant_id, place, mode, partition, request_class, terms, state, url, "
        "job_id) VALUES ($1, $2, 'acme', 'here', 'one', 'halves', 'SS', $3, $4, 'http://10.0.0.1:9', $5)",
        *(name, pool, terms, state, columns.get("job_id")),
    )


async def test_only_pools_with_models_and_their_servers_are_in_the_table(api: PoolApi) -> None:
    await api.made("door", tenant="acme", models=["llama-70b"], fallback=["llama-8b"])
    await api.made("planned-only", tenant="acme")
    await add_instance(api, "door", "instance_a")
    await add_instance(api, "door", "instance_b", "draining")
    await add_instance(api, "door", "instance_c", "starting")
    await add_instance(api, "door", "instance_e", "wanted")
    await add_instance(api, "door", "instance_f", "stopping")
    await add_instance(api, "planned-only", "instance_d")

    found = await table(api)

    assert [(pool.name, pool.models, pool.fallback) for pool in found.pools] == [("door", ["llama-70b"], ["llama-8b"])]
    assert found.pools[0].starting == 2
    servers = {server.id: (server.state, server.request_class) for server in found.servers if server.pool == "door"}
    assert servers == {"instance_a": ("ready", "SS"), "instance_b": ("draining", "SS")}
    assert "instance_d" not in {server.id for server in found.servers}


async def test_power_and_intensity_come_from_the_newest_lines_of_the_ledger(api: PoolApi) -> None:
    await api.made("metered", tenant="acme", models=["metered-model"])
    await add_instance(api, "metered", "instance_m", job_id="job_m")
    await api.database.execute(
        "INSERT INTO energy_usages (node_id, boot_id, sequence, owner, job_id, start_at, end_at, gpus, gpu_energy_j, "
        "cpu_energy_j, static_energy_j, source, zone, signal, intensity_gco2_per_kwh, intensity_estimated, pue, "
        "carbon_gco2) SELECT 'n', 'b', s, 'a', 'job_m', now() - make_interval(secs => 10 * s), "
        "now() - make_interval(secs => 10 * s - 10), 1, 2500, 300, 200, 'counter', 'DE', 'average_direct', 321, false, "
        "1.2, 1 FROM generate_series(1, 3) s"
    )

    (server,) = [each for each in (await table(api)).servers if each.id == "instance_m"]

    assert server.power_w == pytest.approx(300, rel=1e-3)
    assert (server.is_power_measured, server.pue, server.gco2_per_kwh) == (True, 1.2, 321)


async def test_all_servers_have_the_pue_of_the_site_also_before_their_first_line(
    api: PoolApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    await api.made("unmetered", tenant="acme", models=["unmetered-model"])
    await add_instance(api, "unmetered", "instance_u")
    await api.call("PUT", "/v1/endpoints/elsewhere", json=an_endpoint(zone="DE"), tenant="acme")
    monkeypatch.setenv("TELEMETRY_PUE", "1.5")
    pue = ServingSettings.model_validate({"database_url": "postgresql://nowhere", "service_token": TOKEN}).pue
    monkeypatch.setattr(api.routing, "_settings", api.routing._settings.model_copy(update={"pue": pue}))

    found = {each.id: each.pue for each in (await table(api)).servers}

    assert (found["instance_u"], found["endpoint:elsewhere"]) == (1.5, 1.5)


async def test_servers_whose_clocks_follow_latency_carry_the_limits_of_their_class(api: PoolApi) -> None:
    clocks = {"policy": "miad", "step_mhz": 50}
    partition = a_partition("halves")
    partition["classes"][0] |= {"max_tbt_ms": 90}
    await api.made("warm", tenant="acme", models=["warm-model"], clocks=clocks, partitions=[partition])
    await api.made("plain", tenant="acme", models=["plain-model"])
    await add_instance(api, "warm", "instance_w")
    await add_instance(api, "plain", "instance_p")

    found = {each.id: each.clocks for each in (await table(api)).servers}

    limits = LatencyLimits(ttft_s=0.3, tbt_s=0.09, e2e_s=7.0)  # the stated one, and those of the paper's Table 7
    assert found["instance_p"] is None
    assert (following := found["instance_w"]) is not None
    assert (following.limits, following.miad, following.dry_run) == (limits, MiadConfig(2.0, 50.0), False)


async def test_a_model_is_served_by_one_pool_of_a_tenant(api: PoolApi) -> None:
    await api.made("first", tenant="acme", models=["shared-name"])
    other = (await api.call("GET", "/first")).json()["spec"]

    refused = await api.call("PUT", "/second", json=other, tenant="acme")
    allowed = await api.call("PUT", "/elsewhere", json=other, tenant="umbra")

    assert (refused.status_code, refused.json()["detail"]) == (
        409,
        "Pool first serves the model shared-name; a model is served by one pool of a tenant.",
    )
    assert (await api.call("GET", "/second")).status_code == 404
    assert allowed.status_code == 201


async def test_an_endpoint_is_registered_once_changed_and_removed(api: PoolApi) -> None:
    made = await api.call("PUT", "/v1/endpoints/lab", json=an_endpoint(zone="DE"), tenant="acme")
    again = await api.call("PUT", "/v1/endpoints/lab", json=an_endpoint(zone="DE"), tenant="acme")
    assert (made.status_code, again.status_code, again.json()) == (201, 200, made.json())
    (server,) = [each for each in (await table(api)).servers if each.id == "endpoint:lab"]
    assert (server.url, server.models, server.gco2_per_kwh) == ("http://10.8.0.7:8000", ["llama"], 400)
    changed = await api.call("PUT", "/v1/endpoints/lab", json=an_endpoint(draining=True), tenant="acme")
    assert Endpoint.model_validate_json(changed.content).spec.draining
    assert (await api.call("DELETE", "/v1/endpoints/lab")).status_code == 200
    assert (await api.call("GET", "/v1/endpoints/lab")).status_code == 404
    assert await api.audited("lab") == ["endpoint.registered", "endpoint.changed", "endpoint.removed"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"url": "http://169.254.169.254"}, "169.254.169.254 lies in none of the networks"),
        ({"url": "http://[::ffff:169.254.169.254]:80"}, "lies in none of the networks"),
        ({"url": "http://10.8.0.7:99999"}, "Its port must be a number up to 65535."),
        ({"url": "ftp://10.8.0.7"}, "url"),
        ({"url": "http://user:secret@10.8.0.7"}, "url"),
        ({"models": []}, "models"),
        ({"weight": 0}, "weight"),
        ({"draining": "yes"}, "draining"),
        ({"draining": 1}, "draining"),
        ({"zone": "XX"}, "There is no zone XX"),
    ],
)
async def test_what_is_wrong_with_an_endpoint_is_named_and_nothing_is_registered(
    api: PoolApi, change: dict[str, Any], why: str
) -> None:
    answer = await api.call("PUT", "/v1/endpoints/wrong", json=an_endpoint(**change))

    assert (answer.status_code, why in answer.json()["detail"]) == (422, True), answer.text
    assert (await api.call("GET", "/v1/endpoints/wrong")).status_code == 404


async def a_secret(api: PoolApi, name: str, value: str, tenant: str = "acme") -> None:
    """Set a secret as admission does."""
    await api.database.execute("INSERT INTO tenants (id, limits) VALUES ($1, '{}') ON CONFLICT DO NOTHING", tenant)
    await api.database.execute(
        "INSERT INTO secrets (tenant_id, project, name, version, sealed) VALUES ($1, '', $2, 1, $3) "
        "ON CONFLICT (tenant_id, project, name) DO UPDATE SET sealed = excluded.sealed, updated_at = clock_timestamp()",
        *(tenant, name, Sealer(SECRETS_KEY).seal(value, tenant, "", name)),
    )


async def keys(api: PoolApi) -> UpstreamKeys:
    return UpstreamKeys.model_validate_json((await api.call("GET", "/internal/routing/keys")).content)


async def test_a_secret_is_the_key_of_an_endpoint_and_only_routers_get_its_value(api: PoolApi) -> None:
    await a_secret(api, "LAB_KEY", "sk-one")
    spec = an_endpoint(upstream_secret="LAB_KEY")
    made = await api.call("PUT", "/v1/endpoints/keyed", json=spec, tenant="acme")
    assert made.status_code == 201, made.text
    first = await keys(api)
    await a_secret(api, "LAB_KEY", "sk-two")
    (server,) = [each for each in (await table(api)).servers if each.id == "endpoint:keyed"]
    (second,) = (await keys(api)).keys

    assert [(key.server, key.value) for key in first.keys] == [("endpoint:keyed", "sk-one")]
    assert (second.value, server.upstream_secret, server.upstream_secret_set_at) == ("sk-two", "LAB_KEY", second.set_at)
    assert second.set_at > first.keys[0].set_at
    shown = made.text + (await api.call("GET", "/v1/endpoints/keyed", tenant="acme")).text + str(first)
    assert "sk-" not in shown

    await api.database.execute("UPDATE secrets SET sealed = $1 WHERE name = 'LAB_KEY'", b"\x01" + 40 * b"x")
    changed = await keys(api)
    assert (changed.keys, list(changed.missing)) == ([], ["endpoint:keyed"])
    await api.database.execute("DELETE FROM secrets WHERE name = 'LAB_KEY'")
    (server,) = [each for each in (await table(api)).servers if each.id == "endpoint:keyed"]
    assert (await keys(api), server.upstream_secret_set_at) == (UpstreamKeys(keys=[]), None)


async def test_an_endpoint_is_sent_no_secret_that_is_not_its_tenants(api: PoolApi) -> None:
    await a_secret(api, "OURS", "sk-ours")
    path, spec = "/v1/endpoints/guarded", an_endpoint(upstream_secret="OURS")

    of_another = await api.call("PUT", path, json=spec, tenant="umbra")
    both = await api.call("PUT", path, json={**spec, "upstream_key": "file"}, tenant="acme")
    assert (of_another.status_code, of_another.json()["errors"][0]["pointer"]) == (422, "/upstream_secret")
    assert (both.status_code, "name one of them" in both.text) == (422, True)
    assert (await api.call("GET", path)).status_code == 404

    await api.call("PUT", path, json=spec, tenant="acme")
    redirected = await api.call("PUT", path, json={**spec, "url": "http://10.8.0.66"}, tenant="umbra")
    found = await api.call("GET", path)
    assert (redirected.status_code, found.json()["spec"]["url"]) == (403, spec["url"])


async def test_users_see_their_tenants_endpoints_and_register_none(api: PoolApi) -> None:
    await api.call("PUT", "/v1/endpoints/ours", json=an_endpoint(), tenant="acme")
    user: dict[str, Any] = {"role": Role.USER}
    assert (await api.call("GET", "/v1/endpoints/ours", tenant="acme", **user)).status_code == 200
    assert (await api.call("GET", "/v1/endpoints/ours", tenant="umbra", **user)).status_code == 404
    listed = (await api.call("GET", "/v1/endpoints", tenant="umbra", **user)).json()["items"]
    assert [each["name"] for each in listed] == []
    assert (await api.call("PUT", "/v1/endpoints/ours", json=an_endpoint(), **user)).status_code == 403


async def test_a_server_is_not_stopped_while_a_router_holds_a_request_at_it(api: PoolApi) -> None:
    await api.call("POST", "/internal/routing/held", json={"router": "r1", "held": {"instance_x": 2}})
    await api.call("POST", "/internal/routing/held", json={"router": "r2", "held": {"instance_x": 1}})
    assert api.routing.held("instance_x") == 3
    empty = Seen(InstanceState.DRAINING, empties=2)
    assert advance(DRAINING, empty, PROBES, NOW, held_by_routers=3) == {}
    assert advance(DRAINING, empty, PROBES, NOW)["state"] is InstanceState.STOPPING


async def test_the_keys_of_instances_are_for_routers_alone(api: PoolApi) -> None:
    await api.made("keyed", tenant="acme", models=["keyed-model"])
    for name in ("instance_k1", "instance_k2", "instance_k3"):
        await add_instance(api, "keyed", name, "starting" if name == "instance_k3" else "ready")
    sealed = {name: new_instance_key(Sealer(SECRETS_KEY), "acme", name) for name in ("instance_k1", "instance_k3")}
    sealed["instance_k2"] = new_instance_key(Sealer("another key of the installation, long"), "acme", "instance_k2")
    for name, key in sealed.items():
        await api.database.execute("UPDATE pool_instances SET sealed_key = $2 WHERE id = $1", name, key)

    answer = await api.call("GET", "/internal/routing/keys")
    keys = {each.server: each for each in UpstreamKeys.model_validate_json(answer.content).keys}

    assert keys.keys() & sealed.keys() == {"instance_k1"}, "only what is routed, and can be opened"
    assert len(keys["instance_k1"].value) >= 40
    found = {server.id: server.upstream_secret_set_at for server in (await table(api)).servers}
    assert found["instance_k1"] == keys["instance_k1"].set_at
    value = keys["instance_k1"].value
    for path in ("/keyed/instances", "/keyed", ""):
        shown = await api.call("GET", path)
        assert shown.status_code == 200
        assert value not in shown.text
        assert "sealed" not in shown.text
    assert value not in (await api.call("GET", "/internal/routing")).text


async def test_what_cannot_be_read_costs_only_itself(api: PoolApi) -> None:
    """As a later release has stored it, before this one was started again."""
    for name in ("odd", "even"):
        await api.made(name, tenant="acme", models=[f"{name}-model"])
        await add_instance(api, name, f"instance_{name}")
        await api.call("PUT", f"/v1/endpoints/{name}", json=an_endpoint(), tenant="acme")
    await add_instance(api, "even", "instance_odd_terms")
    execute = api.database.execute
    variant = {"name": "v", "accuracy_pct": 80, "command": ["v"]}
    variant["profiles"] = [{"slice": "7g", "service_ms": 9, "busy_w": 90}]
    for name in ("odd", "even"):
        fleet = {"gpus": 1, "gpu_model": "H200-SXM-141GB", "zone": "DE"}
        await execute("INSERT INTO fleets (name, tenant_id, key_id, spec) VALUES ($1, 'a', 'k', $2)", name, fleet)
        for app in ("odd", "even"):
            spec = {"fleet": name, "variants": [variant], "sla_p95_ms": 90, "requests_per_s": 1}
            await execute(
                "INSERT INTO apps (name, tenant_id, key_id, fleet, spec) VALUES ($1, 'a', 'k', $2, $3)",
                *(f"{app}-on-{name}", name, spec),
            )
            await execute(
                "INSERT INTO pool_instances (id, pool, tenant_id, place, mode, terms, state, url) "
                "VALUES ($1, $2, 'a', 'p', 'v.7g', '{}', 'ready', 'http://10.0.0.1:9')",
                *(f"instance_{app}_{name}", f"app:{app}-on-{name}"),
            )
    await execute("""UPDATE pools SET spec = spec || '{"objective": "water"}' WHERE name = 'odd'""")
    await execute("""UPDATE model_endpoints SET spec = spec || '{"url": "quic://x"}' WHERE name = 'odd'""")
    await execute("""UPDATE fleets SET spec = spec || '{"evaluation": "dreamt"}' WHERE name = 'odd'""")
    await execute("""UPDATE apps SET spec = spec || '{"repartition": "never"}' WHERE name LIKE 'odd-%'""")
    await execute("UPDATE pool_instances SET terms = '[]' WHERE id = 'instance_odd_terms'")
    try:
        found = await table(api)
    finally:
        await execute("DELETE FROM pools WHERE name IN ('odd', 'even')")
        await execute("DELETE FROM model_endpoints WHERE name IN ('odd', 'even')")
        await execute("DELETE FROM apps")
        await execute("DELETE FROM fleets")
    names = ({each.name for each in found.pools}, {each.name for each in found.apps})
    assert [{each for each in of if each.startswith(("odd", "even"))} for of in names] == [
        {"even"},
        {"even-on-odd", "even-on-even"},
    ]
    servers = {each.id for each in found.servers}
    assert {"instance_even", "endpoint:even"} <= servers
    assert not servers & {"instance_odd", "endpoint:odd", "instance_odd_terms"}
    assert [each.id for each in found.app_servers] == ["instance_even_even"]
