"""Which accuracy keys ask for of a pool's variants, and of how many of its requests."""

from __future__ import annotations

from typing import Any

from services.db.database import connect
from services.db.engine import create_engine
from services.serving.repository import ServingRepository
from services.serving.repository.cluster import LEAST_FLOOR_SHARE, read_floors
from tests.serving.pools import a_spec, add_pool
from tests.serving.test_problem import VARIANTS

MODEL = "chat-of-floors"


async def test_floors_are_those_of_keys_that_may_use_the_pool_by_their_share_of_its_requests(database_url: str) -> None:
    connection: Any = await connect(database_url, application_name="test")
    spec = a_spec(modes=VARIANTS, models=[MODEL], tenants=["floor_guest"])
    plain = a_spec(models=[MODEL])
    try:
        for tenant in ("floor_owner", "floor_guest", "floor_other"):
            await connection.execute("INSERT INTO tenants (id, limits) VALUES ($1, '{}')", tenant)
        keys = {
            "careful": ("floor_owner", {"least_accuracy_pct": 80.0}),
            "guest": ("floor_guest", {"least_accuracy_pct": 70.0, "models": [MODEL]}),
            "silent": ("floor_owner", {"least_accuracy_pct": 75.0, "models": [], "aliases": {"a": {MODEL: 1}}}),
            "elsewhere": ("floor_owner", {"least_accuracy_pct": 90.0, "models": ["other"]}),
            "other": ("floor_other", {"least_accuracy_pct": 95.0}),
            "gone": ("floor_owner", {"least_accuracy_pct": 99.0}),
            "any": ("floor_owner", {}),
        }
        for name, (tenant, limits) in keys.items():
            await connection.execute(
                "INSERT INTO api_keys (id, tenant_id, role, label, key_sha256, limits, replaced) "
                "VALUES ('floors_' || $1, $2, 'user', '', convert_to($1, 'UTF8'), $3, ARRAY['floors_old_' || $1])",
                *(name, tenant, limits),
            )
        await connection.execute("UPDATE api_keys SET revoked_at = now() WHERE id = 'floors_gone'")
        used = [
            ("floors_careful", 10, 1),
            ("floors_old_careful", 10, 1),
            ("floors_guest", 20, 1),
            ("floors_any", 60, 1),
        ]
        for key, requests, hours in [*used, ("floors_careful", 900, 30)]:
            await connection.execute(
                "INSERT INTO request_usages (router, start_at, job_id, tenant_id, key_id, model, request_class, "
                "requests, input_tokens, output_tokens, share_s, energy_j, carbon_gco2) "
                "VALUES ('r', now() - make_interval(hours => $3), 'j', 't', $1, $4, '', $2, 0, 0, 0, 0, 0)",
                *(key, requests, hours, MODEL),
            )
        await add_pool(connection, "floors", spec)
        await connection.execute("UPDATE pools SET tenant_id = 'floor_owner' WHERE name = 'floors'")
        engine = create_engine(database_url)
        async with ServingRepository(engine).reading() as queries:
            assert await read_floors(queries.connection, "floors", spec) == {
                80.0: 0.2,
                70.0: 0.2,
                75.0: LEAST_FLOOR_SHARE,
            }
            assert await read_floors(queries.connection, "floors", plain) == {}
            every = spec.model_copy(update={"tenants": ["*"]})
            assert 95.0 in await read_floors(queries.connection, "floors", every)
        await engine.dispose()
    finally:
        await connection.execute(
            "DELETE FROM pools WHERE name = 'floors'; DELETE FROM api_keys WHERE id LIKE 'floors%';"
            "DELETE FROM tenants WHERE id LIKE 'floor%'; DELETE FROM request_usages WHERE key_id LIKE 'floors%'"
        )
        await connection.close()
