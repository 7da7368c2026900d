"""The first admin key: made exactly once, and never lost between disk and database."""

import asyncio
import stat
from pathlib import Path

import pytest

from services.admission.admin_key import replace_admin_key
from services.admission.first_start import ensure_first_admin
from services.admission.keys import key_hash
from services.db.engine import create_engine
from tests.support.servers import fresh_database


async def _start(database_url: str, folder: Path) -> str | None:
    engine = create_engine(database_url)
    try:
        return await ensure_first_admin(engine, folder)
    finally:
        await engine.dispose()


async def _stored(database_url: str) -> list[bytes]:
    engine = create_engine(database_url)
    async with engine.connect() as connection:
        rows = (await connection.exec_driver_sql("SELECT key_sha256 FROM api_keys WHERE role = 'admin'")).all()
    await engine.dispose()
    return [row.key_sha256 for row in rows]


async def test_many_first_starts_make_one_key(postgres_url: str, tmp_path: Path) -> None:
    database_url = fresh_database(postgres_url)
    made = await asyncio.gather(*(_start(database_url, tmp_path) for _ in range(8)))
    (secret,) = [secret for secret in made if secret]
    assert await _stored(database_url) == [key_hash(secret)]
    assert (tmp_path / "admin.key").read_text().strip() == secret
    assert stat.S_IMODE((tmp_path / "admin.key").stat().st_mode) == 0o600
    assert await _start(database_url, tmp_path) is None


async def test_a_start_killed_before_the_database_had_the_key(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database_url = fresh_database(postgres_url)

    async def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("services.admission.repository.access.AccessRepository.insert_key", killed)
    with pytest.raises(KeyboardInterrupt):
        await _start(database_url, tmp_path)
    kept = (tmp_path / "admin.key").read_text().strip()
    assert await _stored(database_url) == []
    monkeypatch.undo()
    assert await _start(database_url, tmp_path) == kept
    assert await _stored(database_url) == [key_hash(kept)]


@pytest.mark.parametrize("left", ["", "ws_half", "not a key\n"])
async def test_a_damaged_file_is_replaced(postgres_url: str, tmp_path: Path, left: str) -> None:
    database_url = fresh_database(postgres_url)
    (tmp_path / "admin.key").write_text(left)
    secret = await _start(database_url, tmp_path)
    assert secret
    assert (tmp_path / "admin.key").read_text().strip() == secret


async def test_a_lost_key_is_replaced_and_revoked_and_keys_of_people_stay(postgres_url: str, tmp_path: Path) -> None:
    database_url = fresh_database(postgres_url)
    lost = await _start(database_url, tmp_path)
    (tmp_path / "admin.key").unlink()
    engine = create_engine(database_url)
    async with engine.begin() as connection:
        await connection.exec_driver_sql(
            "INSERT INTO api_keys (id, tenant_id, role, label, key_sha256) VALUES ('mine', 'default', 'admin', '', 'x')"
        )
    first = await replace_admin_key(engine, tmp_path)
    second = await replace_admin_key(engine, tmp_path)
    assert lost
    assert [len(first), len(second)] == [1, 1]
    assert first != second, "the second replaces what the first made"
    kept = (tmp_path / "admin.key").read_text().strip()
    async with engine.connect() as connection:
        query = "SELECT key_sha256 FROM api_keys WHERE role = 'admin' AND revoked_at IS NULL ORDER BY id"
        valid = [row.key_sha256 for row in await connection.exec_driver_sql(query)]
        audit = [tuple(row) for row in await connection.exec_driver_sql("SELECT action, data FROM audit_log")]
    await engine.dispose()
    assert sorted(valid) == sorted([key_hash(kept), b"x"])
    assert [action for action, _ in audit] == ["key.replaced", "key.replaced"]
    assert stat.S_IMODE((tmp_path / "admin.key").stat().st_mode) == 0o600
