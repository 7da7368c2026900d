"""A release that was replaced starts again: on the tables as they are, or on what a downgrade has left of them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from typer.testing import CliRunner

from migrations.releases import NOT_READ, RELEASES
from migrations.run import NoWayBackError, downgrade, is_known, undone_by_going_back, upgrade
from services.admission.repository.access import AccessRepository
from services.cli.main import app
from services.contracts.identity import ResolvedKey, TenantLimits
from services.contracts.jobs import JobSpec
from services.contracts.pools import PoolsProblem
from services.contracts.routing import EndpointSpec
from services.contracts.serving import PoolPlanResult, PoolSpec
from services.contracts.simulations import TrainingProblem
from services.db.engine import create_engine
from services.standalone.data_folder import DataFolder
from services.standalone.stack import database_of
from tests.db.test_upgrades import execute, schema_of
from tests.support.servers import ROOT, fresh_database, scratch_folder

DATA = """
INSERT INTO tenants (id, limits) VALUES ('default', '{}');
INSERT INTO nodes (id, token_sha256, address, agent_url, zone, driver, containers, host_power, devices, state,
                   lease_until)
VALUES ('n1', 'x', 'a', 'u', 'DE', 'simulated', false, 'auto', '[]', 'up', now());
"""
TOOK_SOMETHING = "UPDATE schema_compatibility SET least_revision = (SELECT version_num FROM alembic_version)"


def version_of(url: str) -> str:
    return asyncio.run(execute(url, "SELECT version_num FROM alembic_version"))


def migrations(url: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "migrations", *words]
    environment = {**os.environ, "DATABASE_URL": url}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_every_release_of_the_changelog_has_its_newest_migration() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    assert [line.removeprefix("## ") for line in lines if line.startswith("## ")] == list(RELEASES)
    assert all(map(is_known, RELEASES.values()))


def test_a_release_that_starts_on_the_schema_needs_nothing_undone(postgres_url: str) -> None:
    url = fresh_database(postgres_url)
    head = version_of(url)
    assert undone_by_going_back(url, "0.1.0") == []

    done = migrations(url, "downgrade", "--to", "0.1.0")

    assert (done.returncode, done.stdout) == (0, "0.1.0 starts on this database\n")
    assert version_of(url) == head


def test_what_a_release_cannot_start_on_is_undone_and_data_is_kept(postgres_url: str) -> None:
    url, other = fresh_database(postgres_url), fresh_database(postgres_url)
    asyncio.run(execute(url, DATA + TOOK_SOMETHING))
    wanted = RELEASES["0.1.0"]
    assert len(undone_by_going_back(url, "0.1.0")) == int(version_of(url)) - int(wanted)

    done = migrations(url, "downgrade", "--to", "0.1.0")

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "0.1.0 starts on this database"
    assert version_of(url) == wanted
    assert asyncio.run(execute(url, "SELECT id FROM nodes")) == "n1"
    downgrade(other, wanted)
    assert asyncio.run(schema_of(url)) == asyncio.run(schema_of(other))
    upgrade(url)
    assert asyncio.run(execute(url, "SELECT id FROM nodes")) == "n1"


UNREAD = """
UPDATE tenants SET limits = '{"flex": 40, "burst": 7}';
INSERT INTO tenants (id, limits) VALUES ('quiet', '{"flex": null, "burst": 8}');
INSERT INTO pools (name, tenant_id, key_id, spec) VALUES ('chat', 'default', 'k', '{
    "name": "chat", "regions": [], "modes": [{"name": "a", "accuracy_pct": 90}, {"name": "b", "accuracy_pct": null}]}');
INSERT INTO api_keys (id, tenant_id, key_sha256, role, label) VALUES ('utility', 'default', 'x', 'grid', '');
"""


def test_rows_keep_nothing_that_a_release_fails_to_read(postgres_url: str) -> None:
    url = fresh_database(postgres_url)
    asyncio.run(execute(url, DATA + UNREAD))

    undone = undone_by_going_back(url, "0.1.0")
    assert undone == [
        "flex in limits of tenants (1)",
        "modes.*.accuracy_pct in spec of pools (1)",
        "keys with the role grid, which are revoked (1)",
    ]
    for _ in range(2):  # a call that was cut off is made again
        assert migrations(url, "downgrade", "--to", "0.1.0").returncode == 0

    assert asyncio.run(execute(url, "SELECT string_agg(limits::text, ' ' ORDER BY id) FROM tenants")) == (
        '{"burst": 7} {"burst": 8}'
    )
    spec = asyncio.run(execute(url, "SELECT spec::text FROM pools"))
    assert spec == '{"name": "chat", "modes": [{"name": "a"}, {"name": "b"}], "regions": []}'
    assert asyncio.run(execute(url, "SELECT role || (revoked_at IS NULL) FROM api_keys")) == "userfalse"
    assert undone_by_going_back(url, "0.1.0") == []


def test_what_a_later_release_has_stored_is_read_without_what_is_not_known(postgres_url: str) -> None:
    url = fresh_database(postgres_url)
    later = """UPDATE tenants SET limits = '{"burst": 7, "of_next_year": 1}';
    INSERT INTO api_keys (id, tenant_id, key_sha256, role, label, limits)
    VALUES ('k', 'default', decode('00', 'hex'), 'user', '', '{"models": ["m"], "of_next_year": {"a": 1}}');"""
    asyncio.run(execute(url, DATA + later))

    async def resolved() -> ResolvedKey | None:
        engine = create_engine(url)
        try:
            async with engine.begin() as connection:
                return await AccessRepository(connection).resolve(bytes(1))
        finally:
            await engine.dispose()

    key = asyncio.run(resolved())
    assert key is not None
    assert (key.limits.burst, key.key_limits.models) == (7, ["m"])
    spec = {"name": "n", "command": ["x"], "gpus": {"min": 2, "of_next_year": 1}, "of_next_year": 1}
    assert JobSpec.as_stored(spec).gpus.min == JobSpec.as_stored(json.dumps(spec)).gpus.min == 2


def test_what_a_release_does_not_read_is_there_to_be_left_out() -> None:
    """A path that is misspelt would leave out nothing."""
    for table, column, path in NOT_READ["0.1.0"]:
        model = {
            "tenants": TenantLimits,
            "pools": PoolSpec,
            "model_endpoints": EndpointSpec,
            "simulations": TrainingProblem,
            "solves": PoolsProblem,
            "pool_plans": PoolPlanResult if column == "result" else PoolSpec,
        }.get(table, JobSpec)
        fields: Any = model.model_json_schema()
        defined = fields.get("$defs", {})
        for step in path.removeprefix("spec.").split("."):
            fields = fields["items"] if step == "*" else fields["properties"][step]
            fields = defined[fields["$ref"].rpartition("/")[2]] if "$ref" in fields else fields
        assert column in ("limits", "spec", "problem", "result")


def test_what_cannot_be_changes_nothing(postgres_url: str) -> None:
    url = fresh_database(postgres_url)
    asyncio.run(execute(url, TOOK_SOMETHING))
    head = version_of(url)

    async def while_in_use() -> None:
        connection = await asyncpg.connect(url, server_settings={"application_name": "telemetry"})
        try:
            with pytest.raises(NoWayBackError, match=r"stop them first \(telemetry\)"):
                await asyncio.to_thread(undone_by_going_back, url, "0.1.0")
        finally:
            await connection.close()

    asyncio.run(while_in_use())
    refused = migrations(url, "downgrade", "--to", "0.0.9")
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert "it is one of 0.1.0" in refused.stderr
    assert version_of(url) == head
    asyncio.run(execute(url, "UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(NoWayBackError, match="9999"):
        undone_by_going_back(url, "0.1.0")
    asyncio.run(execute(url, "UPDATE alembic_version SET version_num = '0050'"))
    with pytest.raises(NoWayBackError, match=r"0050, before 0\.1\.0's"):
        undone_by_going_back(url, "0.1.0")


def test_an_installation_that_is_down_goes_back_by_one_command() -> None:
    with scratch_folder() as scratch:
        folder = DataFolder(scratch / "data")
        folder.make()

        async def make() -> None:
            async with database_of(folder, {}, restoring=True) as url:
                await asyncio.to_thread(upgrade, url)
                await execute(url, DATA + TOOK_SOMETHING)

        asyncio.run(make())

        def wattshift(path: Path, answer: str) -> tuple[int, str]:
            words = ["downgrade", "--to", "0.1.0", "--data-dir", str(path)]
            done = CliRunner().invoke(app, words, input=answer)
            return done.exit_code, done.output

        code, said = wattshift(folder.path, "n\n")
        assert code != 0
        assert "0061" in said
        code, said = wattshift(folder.path, "y\n")
        assert (code, said.splitlines()[-1]) == (0, "the database is one that 0.1.0 starts on"), said

        async def found() -> tuple[str, str]:
            async with database_of(folder, {}) as url:
                return await execute(url, "SELECT version_num FROM alembic_version"), await execute(
                    url, "SELECT id FROM nodes"
                )

        assert asyncio.run(found()) == (RELEASES["0.1.0"], "n1")
        folder.open()
        try:
            code, said = wattshift(folder.path, "y\n")
        finally:
            folder.close()
        assert code != 0
