"""What sleeping and booting nodes draw, in the ledger."""

import pytest

from services.db.database import Database
from services.kit.ids import utc_now
from services.telemetry.idle import LIFE
from tests.support.control_plane import OPERATOR, eventually, service_headers, usage
from tests.telemetry.conftest import Plane


async def periods(database: Database, node: str) -> None:
    async with database.connection() as connection:
        await connection.execute(
            "INSERT INTO node_power_periods (node_id, state, start_at, end_at, power_w) VALUES "
            "($1, 'off', now() - interval '140 s', now() - interval '40 s', 10), "
            "($1, 'waking', now() - interval '40 s', now() - interval '10 s', 300), "
            "($1, 'off', now() - interval '10 s', now(), 0)",
            node,
        )


async def test_sleep_and_boot_are_booked_once_as_nobodys_estimated_energy(plane: Plane) -> None:
    await plane.agent("n0")
    await periods(plane.database, "n0")

    async def lines() -> list[tuple[object, ...]]:
        async with plane.database.connection() as connection:
            rows = await connection.fetch(
                "SELECT owner, static_energy_j, gpu_energy_j, source, carbon_gco2 / pue AS carbon FROM energy_usages "
                "WHERE boot_id = $1 ORDER BY sequence",
                LIFE,
            )
        return [tuple(row) for row in rows] if len(rows) == 2 else []

    booked = await eventually(lines)
    assert [row[:4] for row in booked] == [("", 1_000.0, 0.0, "modelled"), ("", 9_000.0, 0.0, "modelled")]
    assert [row[4] for row in booked] == pytest.approx([0.1, 0.9])  # 360 g/kWh

    async def asked(path: str) -> dict:
        return (await plane.http.get(path, headers=service_headers(OPERATOR))).json()

    report = await asked("/v1/reports/footprint")
    assert report["idle"]["estimated_energy_j"] == report["idle"]["energy_j"] == 10_000
    assert (await asked("/v1/invariants"))["holds"]
    seen = (await asked("/v1/nodes/n0"))["power"]
    assert (seen["wakes"], seen["off_s"], seen["waking_s"]) == (1, 110, 30)
    assert seen["estimated_energy_j"] == 10_000


async def test_sleep_is_booked_in_the_zone_the_node_was_in(plane: Plane) -> None:
    agent = await plane.agent("n0", zone="west")
    agent.registration["zone"] = "east"
    await agent.register()
    async with plane.database.connection() as connection:
        await connection.execute("UPDATE node_zones SET since = now() - interval '30 s' WHERE zone = 'east'")
        await connection.execute("UPDATE node_zones SET since = now() - interval '60 s' WHERE zone = 'west'")
    await periods(plane.database, "n0")

    async def zones() -> list[str]:
        async with plane.database.connection() as connection:
            rows = await connection.fetch("SELECT zone FROM energy_usages WHERE boot_id = $1 ORDER BY sequence", LIFE)
        return [row["zone"] for row in rows] if len(rows) == 2 else []

    assert await eventually(zones) == ["west", "west"], "both periods began before the node moved"


async def test_a_zone_of_unknown_intensity_keeps_no_other_from_being_booked(plane: Plane) -> None:
    await plane.agent("n0", zone="atlantis")
    agent = await plane.agent("n1")
    t = utc_now().timestamp()
    assert (await agent.report(agent.interval(t - 2, t - 1, usage(None, 1)))).status_code == 200
    plane.carbon.has_zone = False
    await periods(plane.database, "n0")
    await periods(plane.database, "n1")

    async def booked() -> bool:
        async with plane.database.connection() as connection:
            rows = await connection.fetch("SELECT node_id FROM energy_usages WHERE boot_id = $1", LIFE)
        return [row["node_id"] for row in rows] == ["n1", "n1"]

    assert await eventually(booked)


async def test_a_node_that_is_powered_down_is_asleep_in_lists_and_figures(plane: Plane) -> None:
    for node in ("n0", "n1"):
        await plane.agent(node)
    async with plane.database.connection() as connection:
        await connection.execute("INSERT INTO node_power (node_id, state) VALUES ('n0', 'off')")
    shown = (await plane.http.get("/metrics", headers=service_headers(OPERATOR))).text
    figures = [line for line in shown.splitlines() if line.startswith("wattshift_node_asleep{")]
    assert {("n0" in line, line.split()[-1]) for line in figures} == {(True, "1.0"), (False, "0.0")}

    async def asleep() -> bool:  # not before its lease is over
        listed = (await plane.http.get("/v1/nodes", headers=service_headers(OPERATOR))).json()["items"]
        return [node["state"] for node in listed if node["id"] == "n0"] == ["asleep"]

    assert await eventually(asleep)
