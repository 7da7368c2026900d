"""The Python client against a running gateway."""

import os
import ssl
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.clients.conftest import Front
from wattshift import ApiError, AsyncClient, Client, UnreachableError, WattshiftError
from wattshift._exchange import Account
from wattshift.logins import Login, Logins, write_logins
from wattshift.models import SecretUseFields
from wattshift.sources import Archive

TRAIN = ["python3", "train.py", "--epochs", "3"]


def test_a_job_is_submitted_followed_and_cancelled(client: Client) -> None:
    made = client.submit(
        TRAIN, gpus=(1, 4), project="vision", labels={"team": "a"}, work={"total": 3, "unit": "epochs"}
    )
    job = client.job(made)

    assert (made.name, job.spec.command, job.spec.gpus.min, job.spec.gpus.max) == ("python3", TRAIN, 1, 4)
    assert job.spec.work is not None
    assert job.spec.work.total == 3
    assert job.submitted_at.tzinfo is not None

    cancelled = client.cancel(job)
    events = [event.type for event in client.events(job)]

    assert (cancelled.state, client.wait(made, timeout_s=20).state) == ("cancelled", "cancelled")
    assert (events[0], events[-1]) == ("job.submitted", "job.cancelled")
    assert [event.type for event in client.events(job, follow=False)] == events


def test_an_array_is_submitted_read_and_cancelled_as_one(client: Client) -> None:
    made = client.submit(TRAIN, name="sweep-of-client", array="0-9:3%2")
    then = client.submit(TRAIN, name="evaluate", after={"ok": made.id, "any": ["sweep-of-client.3"]})

    array = client.array(made)
    tasks = list(client.jobs(array=made))
    after = client.job(then).spec.after

    assert (made.count, array.count, array.max_running, array.tasks.queued) == (4, 4, 2, 4)
    assert sorted(task.array_index or 0 for task in tasks) == [0, 3, 6, 9]
    assert after is not None
    assert (after.ok, after.any) == ([made.id], [next(task.id for task in tasks if task.array_index == 3)])
    assert client.hold_array(made).state == "held"
    assert client.release_array(array).state == "queued"
    assert client.cancel_array(made).tasks.cancelled == 4
    assert client.wait_array(made, timeout_s=20).state == "cancelled"


def test_secrets_are_set_named_by_jobs_and_deleted(client: Client) -> None:
    first = client.set_secret("HF_TOKEN", "hunter-2")
    again = client.set_secret("HF_TOKEN", "hunter-3")
    client.set_secret("HF_TOKEN", "hunter-4", project="vision")
    listed = client.secrets()
    uses: list[SecretUseFields] = [{"name": "HF_TOKEN", "env": "TOKEN"}]
    job = client.job(client.submit(TRAIN, hold=True, secrets=uses))
    client.delete_secret("HF_TOKEN")

    assert (first.version, again.version) == (1, 2)
    assert [(secret.name, secret.project, secret.version) for secret in listed] == [
        ("HF_TOKEN", None, 2),
        ("HF_TOKEN", "vision", 1),
    ]
    assert [(use.name, use.env) for use in job.spec.secrets or ()] == [("HF_TOKEN", "TOKEN")]
    assert "hunter" not in repr((first, listed, job))
    assert [secret.project for secret in client.secrets()] == ["vision"]
    with pytest.raises(ApiError, match="There is no secret HF_TOKEN") as caught:
        client.submit(TRAIN, secrets=uses)
    assert caught.value.errors[0].pointer == "/secrets/0/name"


def test_an_upload_that_broke_off_is_continued_and_is_not_sent_again(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "noise").write_bytes(os.urandom(600_000))
    with Archive(tmp_path) as archive:
        path = f"/v1/uploads/{archive.sha256}"
        client.request("PUT", path, json={"size_bytes": archive.size_bytes})
        client.request("PUT", f"{path}/chunks/0", json={"data": archive.chunk(0)})
    sent: list[int] = []
    chunk = Archive.chunk

    def noted(self: Archive, number: int) -> str:
        sent.append(number)
        return chunk(self, number)

    monkeypatch.setattr(Archive, "chunk", noted)
    source = client.upload(tmp_path)

    assert sent == [1]
    assert client.upload(tmp_path) == source
    assert sent == [1]
    job = client.job(client.submit(TRAIN, hold=True, source=source))
    assert job.spec.source is not None
    assert job.spec.source.upload == source.get("upload")


def test_jobs_are_listed_over_all_pages(client: Client) -> None:
    made = client.submit_many([{"name": f"page-{number}", "command": ["true"]} for number in range(600)])

    found = list(client.jobs(name="page-17", state=["queued", "held"]))
    newest = list(client.jobs(limit=550))

    assert [job.name for job in found] == ["page-17"]
    assert len(newest) == len({job.id for job in newest}) == 550
    assert {job.id for job in newest} < {job.id for job in made}
    rows = list(client.job_rows("id", "name", limit=550))
    assert rows == [{"id": job.id, "name": job.name} for job in newest]
    with pytest.raises(ApiError, match="must be some of id, ") as caught:
        next(client.job_rows("nmae"))
    assert caught.value.status == 422


def test_a_key_makes_submissions_one(client: Client) -> None:
    first, second = (client.submit(TRAIN, name="once", idempotency_key="once-1") for _ in range(2))
    other = client.submit(TRAIN, name="once")

    assert first == second
    assert other.id != first.id


def test_held_jobs_are_released(client: Client) -> None:
    job = client.submit(TRAIN, hold=True)

    assert client.job(job).state == "held"
    assert client.release(job).state == "queued"
    assert client.hold(job.id).state == "held"


def test_a_refusal_names_code_and_field(client: Client) -> None:
    with pytest.raises(ApiError) as caught:
        client.submit(TRAIN, gpus=0)
    with pytest.raises(ApiError) as unknown:
        client.job("job_00000000000000000000000000")

    assert (caught.value.status, caught.value.code) == (422, "invalid_request")
    assert [error.pointer for error in caught.value.errors] == ["/gpus/min", "/gpus/max"]
    assert caught.value.request_id
    with pytest.raises(ApiError, match="must have at least 1 entry") as empty:
        client.submit_many([])
    assert (empty.value.status, empty.value.errors[0].pointer) == (422, "/jobs")
    assert (unknown.value.status, unknown.value.code) == (404, "not_found")


def test_footprints_and_grids_are_read(client: Client) -> None:
    job = client.submit(TRAIN)

    assert client.footprint(job).footprint.energy_j == 0
    report = client.report("job", start=datetime(2026, 1, 1, tzinfo=UTC))
    assert (report.group_by, report.total.energy_j) == ("job", 0)
    assert client.nodes() == []
    assert [zone.zone for zone in client.zones()] == ["GB"]
    assert client.intensity("GB").point.gco2_per_kwh > 0
    assert len(client.forecast("GB", horizon_s=3600).points) >= 1


def test_an_instant_without_a_zone_is_refused(client: Client) -> None:
    with pytest.raises(ValueError, match="no time zone"):
        list(client.jobs(submitted_after=datetime(2026, 1, 1)))  # noqa: DTZ001


def test_a_job_that_goes_on_is_waited_for_no_longer_than_allowed(client: Client) -> None:
    job = client.submit(TRAIN, hold=True)

    with pytest.raises(TimeoutError, match=f"{job.id} has not ended within 0 s"):
        client.wait(job, timeout_s=0)


def test_output_of_a_job_that_never_ran_is_empty(client: Client) -> None:
    job = client.submit(TRAIN, hold=True)

    with pytest.raises(ApiError) as caught:
        list(client.logs(job))

    assert caught.value.code == "no_data"


def test_a_command_is_a_list(client: Client) -> None:
    with pytest.raises(TypeError, match=r"such as \['python3', 'train.py'\], not one text"):
        client.submit("python3 train.py")


def test_a_key_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WATTSHIFT_API_KEY", raising=False)
    with pytest.raises(WattshiftError, match="no API key"):
        Client("http://127.0.0.1:1")


def test_a_login_is_used_at_its_own_address_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WATTSHIFT_URL", "WATTSHIFT_API_KEY", "WATTSHIFT_DATA_DIR", "WATTSHIFT_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(WattshiftError, match=r"no API key.*log in with `wattshift login"):
        Client()
    write_logins(Logins({}, None).with_login("lab", Login("https://lab.example", "ws_lab")))

    with Client() as client:
        assert client.url == "https://lab.example"
    assert Account.of(None, None) == Account("https://lab.example", "ws_lab")
    assert Account.of(None, "ws_other") == Account("http://127.0.0.1:8000", "ws_other")
    with pytest.raises(WattshiftError, match="no API key"):
        Client("https://stranger.example")
    monkeypatch.setenv("WATTSHIFT_CLUSTER", "local")
    with pytest.raises(WattshiftError, match="no API key"):
        Client()
    monkeypatch.setenv("WATTSHIFT_CLUSTER", "far")
    with pytest.raises(WattshiftError, match="no login for a cluster 'far'"):
        Client()


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_authorities_are_read_only_where_an_address_has_certificates(
    kind: type[Client | AsyncClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[object] = []
    make = ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", lambda **options: read.append(options) or make(**options))
    for address in ("http://gateway.example", "HTTP://gateway.example", "http://127.0.0.1:8000"):
        kind(address, "ws_key")
    assert read == []
    for address in ("https://gateway.example", "HTTPS://gateway.example"):
        kind(address, "ws_key")
    assert len(read) == 2
    unread = Account("http://gateway.example", "ws_key").verified_by
    assert isinstance(unread, ssl.SSLContext)
    assert (unread.verify_mode, unread.check_hostname) == (ssl.CERT_REQUIRED, True)


def test_a_control_plane_that_is_away_is_said_to_be(front: Front) -> None:
    with (
        Client("http://127.0.0.1:1", front.key, retries=0) as away,
        pytest.raises(UnreachableError, match=":1 does not"),
    ):
        away.job("job_1")


async def test_the_asynchronous_client_does_the_same(front: Front) -> None:
    async with AsyncClient(front.url, front.key) as client:
        job = await client.submit(TRAIN, name="async")
        await client.cancel(job)
        events = [event.type async for event in client.events(job)]
        ended = await client.wait(job, timeout_s=20)
        listed = [each.id async for each in client.jobs(name="async", limit=1)]

    assert (events[-1], ended.state, listed) == ("job.cancelled", "cancelled", [job.id])
