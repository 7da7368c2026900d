"""The servers of pools and of applications: what a newer table changes of them, and what of others counts."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from services.contracts.identity import Identity, Role
from services.contracts.routing import RoutedApp, RoutedAppServer, RoutedPool, RoutedServer, RoutingTable
from services.router.fleet import Fleet

APP = RoutedApp(name="photos", tenant_id="acme", tenants=["umbra"], concurrency=2)
POOL = RoutedPool(name="chat", tenant_id="acme", models=["m"])
SERVER = RoutedServer(id="server", pool="chat", url="http://h:1", tenant_id="acme", location="here", state="ready")
INSTANCE = RoutedAppServer(
    id="instance",
    app="photos",
    variant="b7",
    accuracy_pct=84.6,
    slice="3g",
    url="http://h:2",
    state="ready",
    busy_w=90.0,
    idle_w=10.0,
    gco2_per_kwh=360.0,
    pue=2.0,
    location="edge",
)


def a_table(
    *instances: RoutedAppServer, apps: tuple[RoutedApp, ...] = (APP,), servers: tuple[RoutedServer, ...] = (SERVER,)
) -> RoutingTable:
    made_at = datetime(2026, 1, 1, tzinfo=UTC)
    return RoutingTable(made_at=made_at, pools=[POOL], servers=[*servers], apps=[*apps], app_servers=[*instances])


def test_both_kinds_keep_what_they_hold_over_newer_tables_and_leave_once_they_hold_nothing() -> None:
    fleet = Fleet()
    fleet.adopt(a_table(INSTANCE))
    server, instance = fleet.servers["server"], fleet.instances["instance"]
    assert [each.id for each in fleet.pools["chat"].servers] == ["server"]
    assert [each.id for each in fleet.ready("photos")] == ["instance"]
    server.begin()
    began_s = instance.begin()
    fleet.adopt(a_table(INSTANCE.model_copy(update={"state": "draining"}), servers=()))
    assert fleet.instances["instance"] is instance
    assert not fleet.ready("photos")
    assert fleet.draining() == {"instance": 1, "server": 1}
    fleet.adopt(a_table())
    assert fleet.instance("instance") is instance
    assert {each.id for each in fleet.everyone()} == {"server", "instance"}
    assert [each.id for each in fleet.every_server()] == ["server"]
    instance.end(began_s)
    fleet.adopt(a_table(servers=()))
    assert fleet.draining() == {"server": 1}
    fleet.adopt(a_table(INSTANCE))
    assert fleet.servers["server"] is server
    assert fleet.instances["instance"] is not instance


def test_a_request_to_an_instance_takes_its_power_at_work_and_part_of_the_idle_power() -> None:
    fleet = Fleet()
    fleet.adopt(a_table(INSTANCE))
    footprint = fleet.instances["instance"].footprint(36.0)
    assert footprint.energy_j == 3_600.0
    assert footprint.carbon_gco2 == pytest.approx(0.72)  # 1 Wh at 360 g/kWh, times a PUE of 2
    fleet.adopt(a_table(INSTANCE.model_copy(update={"idle_w": None})))
    assert fleet.instances["instance"].footprint(36.0).energy_j is None


def test_a_server_is_divided_among_processes_and_an_instance_is_not() -> None:
    fleet = Fleet()
    fleet.adopt(a_table(INSTANCE), processes=4)
    assert (fleet.servers["server"].limit, fleet.instances["instance"].limit) == (16, 2)


def test_time_is_divided_by_what_was_held_while_it_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("services.router.fleet.time", SimpleNamespace(monotonic=lambda: now_s))
    fleet = Fleet()
    fleet.adopt(a_table(INSTANCE))
    server = fleet.servers["server"]
    began_s = server.begin()
    fleet.share(2, {"server": 9})
    now_s = 10.0
    fleet.share(2, {})
    now_s = 12.0
    assert server.end(began_s) == pytest.approx(10 / 10 + 2)


@pytest.mark.parametrize(("concurrency", "counted"), [(1, 0), (2, 3)])
def test_what_others_hold_counts_where_an_instance_works_on_several_at_once(concurrency: int, counted: int) -> None:
    fleet = Fleet()
    fleet.adopt(a_table(INSTANCE, apps=(APP.model_copy(update={"concurrency": concurrency}),)))
    fleet.share(2, {"instance": 3, "server": 5})
    assert (fleet.servers["server"].held_elsewhere, fleet.instances["instance"].held_elsewhere) == (5, counted)


@pytest.mark.parametrize(
    ("tenant", "role", "may"),
    [
        ("acme", Role.USER, True),
        ("umbra", Role.USER, True),
        ("other", Role.USER, False),
        ("other", Role.OPERATOR, True),
    ],
)
def test_an_application_is_for_its_tenant_those_it_is_shared_with_and_operators(
    tenant: str, role: Role, may: bool
) -> None:
    fleet = Fleet()
    fleet.adopt(a_table(INSTANCE))
    caller = Identity(tenant_id=tenant, role=role, key_id="key")
    assert (fleet.app_of("photos", caller) is not None) is may
    assert fleet.app_of("unknown", caller) is None


def test_an_instance_that_another_process_named_is_known_until_a_table_says_otherwise() -> None:
    fleet = Fleet()
    fleet.adopt(a_table())
    fleet.add(INSTANCE)
    found = fleet.instance("instance")
    assert found is not None
    assert found.spec.request_class == "b7"
    fleet.adopt(a_table(INSTANCE))
    assert fleet.instances["instance"] is found
