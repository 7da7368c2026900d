"""Uploads: archives in chunks, named by their hash, each tenant's own."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from services.admission.uploads import UploadLimits, Uploads
from services.contracts.sources import UPLOAD_CHUNK_BYTES
from services.db.engine import create_engine
from services.kit.disk import DiskWatch
from tests.admission.conftest import admission_on
from tests.admission.installation import Admission, an_entry

LARGEST = 3 * UPLOAD_CHUNK_BYTES


@pytest.fixture(scope="module")
async def admission(
    database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Admission]:
    """Admission that takes small archives."""
    folder: Path = tmp_path_factory.mktemp("admission")
    limits = {"upload_max_bytes": LARGEST, "upload_quota_bytes": LARGEST + 1_000, "capacity_max_age_s": 0.001}
    async with admission_on(database_url, redis_url, folder, **limits) as found:
        yield found


def content(seed: int, size: int = UPLOAD_CHUNK_BYTES + 100) -> tuple[bytes, str]:
    data = random.Random(seed).randbytes(size)
    return data, hashlib.sha256(data).hexdigest()


async def start(admission: Admission, tenant: str, name: str, size: int) -> Any:
    return await admission.ask("PUT", f"/v1/uploads/{name}", tenant=tenant, json={"size_bytes": size})


async def send(admission: Admission, tenant: str, name: str, number: int, data: bytes) -> Any:
    part = data[number * UPLOAD_CHUNK_BYTES : (number + 1) * UPLOAD_CHUNK_BYTES]
    body = {"data": base64.b64encode(part).decode()}
    return await admission.ask("PUT", f"/v1/uploads/{name}/chunks/{number}", tenant=tenant, json=body)


async def upload(admission: Admission, tenant: str, data: bytes) -> str:
    name = hashlib.sha256(data).hexdigest()
    state = (await start(admission, tenant, name, len(data))).json()
    while state["next_chunk"] is not None:
        state = (await send(admission, tenant, name, state["next_chunk"], data)).json()
    return name


async def test_an_archive_is_sent_in_parts_and_continued_where_it_broke_off(admission: Admission) -> None:
    tenant = await admission.make_tenant("parts")
    data, name = content(1)

    begun = (await start(admission, tenant, name, len(data))).json()
    first = (await send(admission, tenant, name, 0, data)).json()
    again = (await start(admission, tenant, name, len(data))).json()
    repeated = (await send(admission, tenant, name, 0, data)).json()
    whole = (await send(admission, tenant, name, 1, data)).json()

    assert (begun["chunks"], begun["next_chunk"], begun["size_bytes"]) == (2, 0, len(data))
    assert [state["next_chunk"] for state in (first, again, repeated, whole)] == [1, 1, 1, None]
    assert (await start(admission, tenant, name, len(data))).json() == whole
    assert (await send(admission, tenant, name, 1, b"")).json() == whole, "a late repetition changes nothing"
    assert (await admission.ask("GET", f"/v1/uploads/{name}", tenant=tenant)).json() == whole


async def test_what_arrives_damaged_is_dropped_and_sent_anew(admission: Admission) -> None:
    tenant = await admission.make_tenant("damaged")
    data, name = content(2)
    await start(admission, tenant, name, len(data))
    await send(admission, tenant, name, 0, data)
    refused = await send(admission, tenant, name, 1, data[:-1] + bytes([data[-1] ^ 1]))

    assert refused.status_code == 422
    assert "does not have the SHA-256" in refused.json()["detail"]
    assert (await admission.ask("GET", f"/v1/uploads/{name}", tenant=tenant)).status_code == 404
    assert await upload(admission, tenant, data) == name


async def test_a_tenant_finds_its_own_uploads_only(admission: Admission) -> None:
    mine, yours = await admission.make_tenant("mine"), await admission.make_tenant("yours")
    data, _ = content(3)
    name = await upload(admission, mine, data)

    assert (await admission.ask("GET", f"/v1/uploads/{name}", tenant=yours)).status_code == 404
    assert (await send(admission, yours, name, 0, data)).status_code == 404
    other, own = await admission.submit_all(
        an_entry({"source": {"upload": name}}, tenant=yours), an_entry({"source": {"upload": name}}, tenant=mine)
    )
    assert (other.status, own.status) == (422, 201)
    assert json.loads(other.body)["errors"][0]["pointer"] == "/source/upload"
    assert (await start(admission, yours, name, len(data))).json()["next_chunk"] == 0, "it has to send it itself"


async def test_a_job_cannot_name_an_upload_that_is_not_whole(admission: Admission) -> None:
    tenant = await admission.make_tenant("unfinished")
    data, name = content(4)
    await start(admission, tenant, name, len(data))
    (answer,) = await admission.submit_all(an_entry({"source": {"upload": name}}, tenant=tenant))

    assert answer.status == 422
    assert json.loads(answer.body)["detail"].startswith("There is no complete upload with this SHA-256")


async def test_size_and_quota_are_kept(admission: Admission) -> None:
    tenant = await admission.make_tenant("large")
    _, name = content(5)
    too_large = await start(admission, tenant, name, LARGEST + 1)
    assert (too_large.status_code, too_large.json()["code"]) == (413, "body_too_large")
    assert too_large.json()["detail"] == "The archive has 1.5 MiB; at most 1.5 MiB can be uploaded."
    assert (await start(admission, tenant, name, LARGEST)).status_code == 200
    other_size = await start(admission, tenant, name, LARGEST - 1)
    assert (other_size.status_code, other_size.json()["code"]) == (409, "conflict")
    over = await start(admission, tenant, "0" * 64, 1_001)
    assert (over.status_code, over.json()["code"]) == (403, "quota_exceeded")
    assert (await start(admission, tenant, "0" * 64, 1_000)).status_code == 200


@pytest.mark.parametrize(
    ("number", "size", "status"), [("0", 10, 422), ("1", 101, 422), ("2", 0, 422), ("7", 10, 422), ("x", 10, 404)]
)
async def test_parts_have_their_size(admission: Admission, number: str, size: int, status: int) -> None:
    tenant = f"sizes-{number}"
    await admission.make_tenant(tenant)
    data, name = content(6)
    await start(admission, tenant, name, len(data))
    body = {"data": base64.b64encode(bytes(size)).decode()}
    answer = await admission.ask("PUT", f"/v1/uploads/{name}/chunks/{number}", tenant=tenant, json=body)

    assert answer.status_code == status
    assert await admission.count("upload_chunks", f"tenant_id = '{tenant}'") == 0


async def test_what_is_no_base64_or_no_hash_is_refused(admission: Admission) -> None:
    tenant = await admission.make_tenant("nonsense")
    _, name = content(7)
    await start(admission, tenant, name, 10)
    body = {"data": "not base64!"}
    assert (await admission.ask("PUT", f"/v1/uploads/{name}/chunks/0", tenant=tenant, json=body)).status_code == 422
    assert (await start(admission, tenant, name.upper(), 10)).status_code == 404
    assert (await start(admission, tenant, name[:-1], 10)).status_code == 404


async def test_uploads_go_when_no_job_needs_them_and_they_are_old(admission: Admission) -> None:
    tenant = await admission.make_tenant("clearing")
    named = {}
    for seed, what in enumerate(("unused", "waiting", "ended", "fresh", "partial"), start=10):
        data, name = content(seed, 1_000 if what != "partial" else UPLOAD_CHUNK_BYTES + 1)
        named[name] = what
        await (start(admission, tenant, name, len(data)) if what == "partial" else upload(admission, tenant, data))
    names = {what: name for name, what in named.items()}
    await admission.submit({"source": {"upload": names["waiting"]}, "hold": True}, tenant=tenant)
    await admission.end(await admission.submit({"source": {"upload": names["ended"]}}, tenant=tenant))
    old = [name for name, what in named.items() if what not in ("fresh",)]
    await admission.database.execute(
        "UPDATE uploads SET used_at = now() - interval '2 hours' WHERE tenant_id = $1 AND sha256 = ANY($2)", tenant, old
    )

    engine = create_engine(admission.database_url, application_name="test")
    await Uploads(engine, UploadLimits(1, 1, kept_s=3_600), DiskWatch(None, 0)).clear()
    await engine.dispose()

    rows = await admission.database.fetch("SELECT sha256 FROM uploads WHERE tenant_id = $1", tenant)
    assert sorted(named[row["sha256"]] for row in rows) == ["fresh", "waiting"]
    left = await admission.database.fetch("SELECT DISTINCT sha256 FROM upload_chunks WHERE tenant_id = $1", tenant)
    assert sorted(named[row["sha256"]] for row in left) == ["fresh", "waiting"]


async def test_a_submission_keeps_its_upload_from_going(admission: Admission) -> None:
    tenant = await admission.make_tenant("keeping")
    data, _ = content(20, 900)
    name = await upload(admission, tenant, data)
    await admission.database.execute("UPDATE uploads SET used_at = now() - interval '9 days' WHERE sha256 = $1", name)
    await admission.submit({"source": {"upload": name}}, tenant=tenant)
    assert await admission.count("uploads", f"sha256 = '{name}' AND used_at > now() - interval '1 minute'") == 1


SHA = "a" * 64
COMMIT = "b" * 40


async def test_submissions_lock_the_uploads_that_they_name_in_one_order(admission: Admission) -> None:
    """Two that name the same ones must not wait for each other."""
    tenant = await admission.make_tenant("orders")
    names = sorted([await upload(admission, tenant, content(seed, 100)[0]) for seed in (31, 32)])
    move = "UPDATE uploads SET used_at = now() WHERE sha256 = $1"
    await admission.database.execute(move, names[0])  # behind the other one, where it is found last
    jobs = [{"name": f"j{at}", "command": ["x"], "source": {"upload": name}} for at, name in enumerate(names)]
    other = await asyncpg.connect(admission.database_url)
    lock = "SELECT FROM uploads WHERE sha256 = $1 FOR UPDATE"
    try:
        async with asyncio.timeout(10), other.transaction():
            await other.execute(lock, names[0])
            submitted = asyncio.create_task(admission.submit_all(an_entry(jobs, tenant=tenant)))
            await asyncio.wait({submitted}, timeout=0.3)
            await other.execute(lock, names[1])  # the submission has not locked it, as it waits for the first
        assert [answer.status for answer in await submitted] == [201]
    finally:
        await other.close()


async def test_clearing_up_leaves_what_a_submission_is_just_naming(admission: Admission) -> None:
    tenant = await admission.make_tenant("just-named")
    name = await upload(admission, tenant, content(33, 100)[0])
    await admission.database.execute("UPDATE uploads SET used_at = now() - interval '1 year' WHERE sha256 = $1", name)
    other = await asyncpg.connect(admission.database_url)
    try:
        async with asyncio.timeout(10), other.transaction():
            await other.execute("SELECT FROM uploads WHERE sha256 = $1 FOR UPDATE", name)
            await admission.app.state.uploads.clear()
    finally:
        await other.close()
    assert await admission.count("uploads", f"sha256 = '{name}'") == 1
    await admission.app.state.uploads.clear()
    assert await admission.count("uploads", f"sha256 = '{name}'") == 0


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({"source": {}}, "name one of them"),
        ({"source": {"upload": SHA, "git": {"url": "https://h/p", "revision": COMMIT}}}, "name one of them"),
        ({"source": {"upload": "."}}, "/source/upload"),
        ({"source": {"git": {"url": "https://h/p", "revision": "main"}}}, "/source/git/revision"),
        ({"source": {"git": {"url": "https://u:p@h/p", "revision": COMMIT}}}, "given by a secret"),
        ({"source": {"git": {"url": "ext::sh -c x", "revision": COMMIT}}}, "must be https://HOST/PATH"),
        ({"source": {"git": {"url": "--upload-pack=x", "revision": COMMIT}}}, "must be https://HOST/PATH"),
        ({"source": {"git": {"url": "ssh://-oProxyCommand=x/p", "revision": COMMIT}}}, "must be https://HOST/PATH"),
        ({"source": {"git": {"url": "git@-oX:p", "revision": COMMIT}}}, "must be https://HOST/PATH"),
        ({"source": {"git": {"url": "http://h/p", "revision": COMMIT}}}, "must be https://HOST/PATH"),
        ({"source": {"upload": SHA}, "working_dir": "/tmp"}, "/working_dir: must be a path in the source"),
        ({"source": {"upload": SHA}, "working_dir": "a/../../b"}, "/working_dir: must be a path in the source"),
        ({"working_dir": "src"}, "/working_dir: must be an absolute path"),
    ],
)
async def test_sources_that_make_no_sense_are_refused(admission: Admission, spec: dict[str, Any], named: str) -> None:
    (answer,) = await admission.submit_all(an_entry(spec))
    assert answer.status == 422
    assert named in json.loads(answer.body)["detail"]


async def test_the_secret_of_a_repository_has_to_exist(admission: Admission) -> None:
    git = {"url": "git@example.org:team/repo.git", "revision": COMMIT, "secret": "NONE"}
    (answer,) = await admission.submit_all(an_entry({"source": {"git": git}}))
    assert answer.status == 422
    assert json.loads(answer.body)["errors"][0]["pointer"] == "/source/git/secret"
