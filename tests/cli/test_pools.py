"""``wattshift pools``: against gateway, admission and serving as processes, on real servers."""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from services.cli.commands import EXIT_NOT_FOUND, EXIT_REFUSED, EXIT_USAGE, CliError
from services.cli.main import app
from services.cli.serving.pools import ASKED_BY
from services.contracts.serving import PlanTrigger
from tests.support.services import services

EXAMPLE = Path(__file__).parents[2] / "examples" / "pools" / "two-zones.json"


@pytest.fixture(scope="module")
def address(database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Where the gateway is, and an admin's key."""
    with (
        services(tmp_path_factory.mktemp("pools"), database_url, redis_url) as found,
        found.started("services.admission.app"),
        found.started("services.serving.app"),
        found.started("gateway.app", ready_path="/healthz"),
    ):
        yield found.urls["GATEWAY"], found.admin_key()


@pytest.fixture(autouse=True)
def _at_that_address(address: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATTSHIFT_URL", address[0])
    monkeypatch.setenv("WATTSHIFT_API_KEY", address[1])


@pytest.fixture
def wattshift(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run ``wattshift pools ...`` and return what it prints: as JSON, if that is asked for."""

    def run(*words: str, exit_code: int = 0) -> Any:
        # Without standalone mode an exit is what the call returns.
        assert (app(["pools", *words], standalone_mode=False) or 0) == exit_code
        shown = capsys.readouterr().out
        return json.loads(shown) if "--json" in words else shown

    return run


def execute(database_url: str, query: str, *values: Any) -> list[asyncpg.Record]:
    async def run() -> list[asyncpg.Record]:
        connection = await asyncpg.connect(database_url)
        try:
            return await connection.fetch(query, *values)
        finally:
            await connection.close()

    return asyncio.run(run())


def test_a_pool_from_its_file_to_its_end(wattshift: Any) -> None:
    assert "chat is at revision 1, automatic" in wattshift("set", "chat", str(EXAMPLE))
    pool = wattshift("set", "chat", str(EXAMPLE), "--json")
    assert pool["revision"] == 1
    command = pool["spec"]["modes"][0]["command"]
    assert command[:2] == [sys.executable, str(EXAMPLE.with_name("stand_in_server.py"))]
    assert "chat is fixed" in wattshift("mode", "chat", "fixed")
    shown = wattshift("show", "chat")
    assert "california (US-CAL-CISO), germany (DE)" in shown
    assert "one-gpu (1 x A100-SXM4-40GB)" in shown
    assert "chat" in wattshift("list")
    assert [pool["name"] for pool in wattshift("--json")] == ["chat"]
    assert "no instances" in wattshift("instances", "chat")
    assert "being deleted" in wattshift("delete", "chat")


RESULT = {
    "forecasts": {
        "step_s": 300.0,
        "demand": {},
        "gpus": {},
        "intensity": {
            "germany": {
                **{"zone": "DE", "signal": "average_direct", "provider": "recorded", "method": "persistence"},
                **{"generated_at": "2026-11-20T12:00:00Z", "is_stale": False, "gco2_per_kwh": [300.0] * 6},
            }
        },
    },
    "plan": {
        **{"status": "optimal", "solver": "highs", "partition": "a", "emissions_kg": 0.25, "energy_kwh": 0.9},
        "instances": [{"location": "germany", "request_class": "SS", "mode": "one-gpu", "count": 2, "power_w": 250.0}],
        "starts": [{"location": "germany", "mode": "one-gpu", "count": 2}],
    },
}


def unrouted(folder: Path, **changes: Any) -> str:
    """Return a file with the example as a pool that the router knows no model of: only one pool may serve a model."""
    file = folder / "unrouted.json"
    file.write_text(json.dumps({**json.loads(EXAMPLE.read_text()), "models": [], **changes}))
    return str(file)


def answer_at_once(database_url: str, pool: str, **columns: Any) -> None:
    """Have the database answer plans of a pool as soon as they are submitted."""
    values = {"state": "succeeded", "ended_at": datetime.now(UTC).isoformat(), "result": RESULT, **columns}
    document = json.dumps(values).replace("'", "''")
    execute(
        database_url,
        f"""CREATE FUNCTION answer_{pool}() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN RETURN jsonb_populate_record(NEW, '{document}'); END $$""",
    )
    execute(
        database_url,
        f"""CREATE TRIGGER answered_{pool} BEFORE INSERT ON pool_plans FOR EACH ROW
            WHEN (NEW.pool = '{pool}') EXECUTE FUNCTION answer_{pool}()""",
    )


def test_a_proposal_is_shown_and_accepted(wattshift: Any, database_url: str, tmp_path: Path) -> None:
    answer_at_once(database_url, "proposed")
    wattshift("set", "proposed", unrouted(tmp_path, mode="fixed"))
    shown = wattshift("plan", "proposed", "--wait")
    assert "start: 2 x one-gpu in germany" in shown
    assert "0.250 kgCO2, 0.900 kWh in 0.5 h" in shown
    assert "is proposed" in shown
    proposals = wattshift("plans", "proposed", "--outcome", "proposed", "--json")
    newest = next(plan for plan in proposals if plan["trigger"] == "request")  # the clock may have asked for one since
    assert "is applied" in wattshift("accept", "proposed", newest["id"])
    assert newest["id"] in wattshift("plans", "proposed")
    found = wattshift("show", "proposed", "--json")
    assert (found["plan"]["id"], found["plan"]["outcome"]) == (newest["id"], "applied")
    assert "0.250 kgCO2" in wattshift("show", "proposed")


def test_a_plan_that_fails_is_an_exit_code(wattshift: Any, database_url: str, tmp_path: Path) -> None:
    failure = {"code": "internal", "detail": "the zone has no forecast"}
    answer_at_once(database_url, "failing", state="failed", result=None, failure=failure)
    wattshift("set", "failing", unrouted(tmp_path))
    assert "the zone has no forecast" in wattshift("plan", "failing", "--wait", exit_code=1)


def test_instances_that_ended_are_shown_if_asked_for(wattshift: Any, database_url: str, tmp_path: Path) -> None:
    wattshift("set", "fleet", unrouted(tmp_path))
    execute(
        database_url,
        """INSERT INTO pool_instances (id, pool, tenant_id, place, mode, terms, state, reason, url)
           VALUES ('instance_' || repeat('0', 26), 'fleet', 'ops', 'germany', 'one-gpu', '{}', 'ended', 'unhealthy',
                   'http://10.0.0.1:9000')""",
    )
    assert wattshift("instances", "fleet", "--json") == []
    (found,) = wattshift("instances", "fleet", "--all", "--json")
    assert (found["place"], found["reason"]) == ("germany", "unhealthy")
    shown = wattshift("instances", "fleet", "--all")
    assert "http://10.0.0.1:9000" in shown
    assert "unhealthy" in shown


def test_clocks_are_shown_as_they_are_and_as_they_were(wattshift: Any, database_url: str, tmp_path: Path) -> None:
    wattshift("set", "clocked", unrouted(tmp_path))
    assert "no clocks have followed latency" in wattshift("clocks", "clocked")
    instance = f"instance_{'7' * 26}"
    reading = {"index": 0, "power_w": 1, "utilization": 0, "clock_mhz": 1305, "latency_clock_mhz": 1200}
    execute(
        database_url,
        f"""WITH job AS (INSERT INTO jobs (id, tenant_id, name, project, labels, spec, state, queued_at)
                    VALUES ('job_c', 'ops', 'server', 'p', '{{}}', '{{}}', 'running', now())),
             node AS (INSERT INTO nodes (id, token_sha256, address, agent_url, zone, driver, containers, host_power,
                                         devices, readings)
                      VALUES ('clocked', '', '', '', 'DE', 'nvml', false, 'rapl', '[]', '[{json.dumps(reading)}]')),
             minute AS (INSERT INTO server_clocks
                        VALUES ('job_c', '2026-03-01T12:00Z', 'clocked', 'learned', true, 60, 2, 900.4, 795, 1410,
                                1200, NULL, 'few_clocks', 15))
        INSERT INTO pool_instances (id, pool, tenant_id, place, mode, terms, state, job_id)
        VALUES ('{instance}', 'clocked', 'ops', 'germany', 'one-gpu', '{{}}', 'ready', 'job_c')""",
    )
    execute(
        database_url,
        """INSERT INTO allocations (id, job_id, generation, state, gpus, shares, master_port)
           VALUES ('job_c.1', 'job_c', 1, 'running', 1, '[{"node_id": "clocked", "devices": [0]}]', 1)""",
    )
    assert "1305 MHz, learned would set 1200" in wattshift("instances", "clocked")
    (found,) = wattshift("clocks", "clocked", "--json")
    assert (found["instance"], found["decisions"]) == (instance, 60)
    shown = wattshift("clocks", "clocked", "--instance", instance, "--since", "2026-03-01T12:00")
    parts = (
        "Sun 2026-03-01 12:00 UTC",
        "learned, dry run",
        "900 MHz",
        "795 .. 1410",
        " 2 of 60",
        "15 of 60",
        "few_clocks",
    )
    for part in parts:
        assert part in shown
    assert wattshift("clocks", "clocked", "--since", "1min", "--json") == []
    with pytest.raises(CliError, match=r"--since: .soon. is neither an age"):
        wattshift("clocks", "clocked", "--since", "soon")
    execute(database_url, "UPDATE server_clocks SET dry_run = false")
    kept = "1305 MHz, learned, kept for 25 % of the minute: nothing seen of its requests "
    assert kept in wattshift("instances", "clocked")
    execute(database_url, "UPDATE server_clocks SET unobserved = 0")
    assert "1305 MHz, learned " in wattshift("instances", "clocked")


def test_a_log_is_reported_and_again_it_counts_once(wattshift: Any, database_url: str, tmp_path: Path) -> None:
    wattshift("set", "logged", unrouted(tmp_path))
    start_s = (datetime.now(UTC).timestamp() - 7_200) // 5 * 5
    times_s = [start_s + 4_999.5, *(start_s + 0.5 * number for number in range(100))]  # the order does not matter
    log = tmp_path / "log.csv"
    rows = [f"{datetime.fromtimestamp(at_s, UTC).isoformat()},200,{number}" for number, at_s in enumerate(times_s)]
    log.write_text("\n".join(["arrived_at,input_tokens,output_tokens", *rows]))
    for _ in range(2):
        assert wattshift("report", "logged", str(log), "--json") == {"windows": 1_000, "requests": 101}
    query = """SELECT count(*) AS windows, sum((counts #>> '{"184,444",LS}')::int) AS short,
                      sum((counts #>> '{any,any}')::int) AS requests FROM pool_traffic WHERE pool = 'logged'"""
    (row,) = execute(database_url, query)
    assert tuple(row) == (1_000, 101, 101)
    since = str(start_s + 4_000)
    assert wattshift("report", "logged", str(log), "--since", since, "--json") == {"windows": 1, "requests": 1}
    packed = tmp_path / "log.csv.gz"
    packed.write_bytes(gzip.compress(log.read_bytes()))
    assert "101 requests in 1.39 h" in wattshift("report", "logged", str(packed), "--source", "another")


HEAD = b"arrived_at,input_tokens,output_tokens\n"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("cut short.gz", gzip.compress(HEAD, mtime=0)[:-9], "is not readable text"),
        ("not compressed.gz", HEAD, "has no requests"),
        ("no number.gz", gzip.compress(HEAD + b"1,1,x\n", mtime=0), "line 2"),
        ("no column", b"arrived_at,input_tokens\n1,2\n", "no column 'output_tokens'"),
        ("no time", HEAD + b"2026-11-20,1,1\n2026-11-20,x,1\n", "line 3"),
        ("no line", HEAD, "has no requests"),
        ("no cell", HEAD + b"1,1\n", "line 2"),
    ],
)
def test_a_log_that_is_none_is_refused(wattshift: Any, tmp_path: Path, name: str, content: bytes, says: str) -> None:
    log = tmp_path / name
    log.write_bytes(content)
    with pytest.raises(CliError, match=says) as refused:
        wattshift("report", "logged", str(log))
    assert refused.value.exit_code == EXIT_USAGE


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_a_spec_with_what_is_no_finite_number_is_one_line(wattshift: Any, tmp_path: Path, number: str) -> None:
    file = tmp_path / "nan.json"
    file.write_text(f'{{"places": [{{"name": "a"}}, {{"price_per_kwh": {number}}}]}}')
    with pytest.raises(CliError, match=r"nan\.json: places\.1\.price_per_kwh: must be a finite number, not (nan|inf)$"):
        wattshift("set", "numbers", str(file))


def test_refusals_have_exit_codes(wattshift: Any, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps({**json.loads(EXAMPLE.read_text()), "places": []}))
    for words, exit_code, says in (
        (("show", "nobody"), EXIT_NOT_FOUND, "no such pool"),
        (("set", "x", str(wrong)), EXIT_REFUSED, "/places"),
        (("set", "x", str(tmp_path / "absent.json")), EXIT_NOT_FOUND, "cannot be read"),
        (("mode", "nobody", "sometimes"), EXIT_REFUSED, "/mode"),
        (("report", "nobody", str(tmp_path / "absent.csv")), EXIT_NOT_FOUND, "there is no file"),
    ):
        with pytest.raises(CliError, match=says) as refused:
            wattshift(*words)
        assert refused.value.exit_code == exit_code, words


def test_every_trigger_of_a_plan_has_words() -> None:
    assert ASKED_BY.keys() == set(PlanTrigger)
