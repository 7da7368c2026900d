"""An export of the ledger is checked by one file, and whatever is changed in it is found."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.db.sealing import Sealer
from services.kit.ids import utc_now
from services.telemetry.repository.corrections import return_late
from services.telemetry.seals import Signer, close_days
from tests.support.control_plane import OPERATOR, USER, accept_job, allocate, end_allocation, service_headers, usage
from tests.support.ledger import end_day, fold_now
from wattshift import verify

DAY_S = 86_400.0
SIGNED = r"(day|sum|end) [0-9a-f]{64} [0-9a-f]{128} "
VECTORS = (  # RFC 8032, section 7.1: secret key, public key, message, signature
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24"
        "655141438e7a100b",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aee"
        "b00d291612bb0c00",
    ),
    (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28d"
        "c027beceea1ec40a",
    ),
)


@pytest.mark.parametrize(("secret", "public", "message", "signature"), VECTORS)
def test_the_vectors_of_rfc_8032(secret: str, public: str, message: str, signature: str) -> None:
    key, text, mark = bytes.fromhex(public), bytes.fromhex(message), bytes.fromhex(signature)
    assert Ed25519PrivateKey.from_private_bytes(bytes.fromhex(secret)).sign(text) == mark
    assert verify.signed(key, text, mark)
    assert not verify.signed(key, text + b"x", mark)
    assert not verify.signed(key, text, bytes([mark[0] ^ 1]) + mark[1:])
    assert not verify.signed(bytes([key[0] ^ 1]) + key[1:], text, mark)
    more = (int.from_bytes(mark[32:], "little") + verify.ORDER).to_bytes(32, "little")
    assert not verify.signed(key, text, mark[:32] + more), "a second form of the same signature"
    assert not verify.signed(b"\xff" * 32, text, mark)


@given(st.binary(max_size=200), st.binary(min_size=32, max_size=32))
@settings(max_examples=15, deadline=None)
def test_signatures_are_those_of_cryptography(text: bytes, secret: bytes) -> None:
    key = Ed25519PrivateKey.from_private_bytes(secret)
    assert verify.signed(key.public_key().public_bytes_raw(), text, key.sign(text))


async def export(plane: Any, form: str = "csv", **period: str) -> str:
    params = {"format": form, "seals": "true", **period}
    answer = await plane.http.get("/v1/reports/lines", params=params, headers=service_headers(OPERATOR))
    assert answer.status_code == 200, answer.text
    return answer.text


async def a_ledger(plane: Any) -> Signer:
    """Make a ledger with a folded day, corrections of it and of lines, signed days, a tail, and lines of the past."""
    signer = Signer(plane.database, Sealer("k" * 32))
    await signer.use(close_days)
    agent = await plane.agent(zone="DE")
    job, other = [await accept_job(plane.database, labels={"user": name}) for name in ('ada "x",",y\u2028', "bob")]
    gangs = [await allocate(plane.database, each, {"n0": [at]}) for at, each in enumerate((job, other))]
    now = utc_now().timestamp()
    old = now // DAY_S * DAY_S - 5 * DAY_S

    async def use(*moments: float) -> None:
        used = (usage(gangs[0], 1_000 / 3, cpu_energy_j=7), usage(gangs[1], 5e-7), usage(None, 1, static_energy_j=2))
        await agent.report(*(agent.interval(at, at + 10, *used) for at in moments))

    async with plane.database.transaction() as connection:
        await connection.execute("SET LOCAL session_replication_role = replica")
        await connection.execute(
            """INSERT INTO energy_usages (node_id, boot_id, sequence, owner, start_at, end_at, gpus, gpu_energy_j,
                cpu_energy_j, static_energy_j, source, zone, signal, intensity_gco2_per_kwh, intensity_estimated, pue,
                carbon_gco2) VALUES ('n0', 'b', 1, '', $1, $1, 1, 3.6e6, 0, 0, 'counter', 'DE', 'average_direct', 100,
                false, 1, 100)""",
            datetime.fromtimestamp(now - DAY_S, UTC),
        )
    await use(old, old + 20)
    await fold_now(plane.database, 2 * DAY_S, signer.sign)
    await use(now - 100, now - 90)
    await use(now - 80)
    await end_day(plane.database, signer.sign)
    end = datetime.fromtimestamp(old - 100, UTC)
    for gang in gangs[1:]:
        await end_allocation(plane.database, gang)
    async with plane.database.connection() as connection:
        await connection.execute("UPDATE allocations SET ended_at = $1 WHERE id = $2", end, gangs[1])
    assert await return_late(plane.database, signer.sign) == 1
    await end_day(plane.database, signer.sign)
    await use(now - 70)
    return signer


def faults_of(path: Path, text: str, processes: int = 1) -> list[str]:
    path.write_text(text)
    check = verify.Check(str(path), processes)
    try:
        return check.run()
    except (OSError, ValueError, KeyError, IndexError, TypeError, verify.csv.Error) as error:
        return [str(error)]


@pytest.mark.parametrize("form", ["csv", "jsonl"])
async def test_an_export_of_all_that_a_ledger_goes_through_is_right(plane, tmp_path: Path, form: str) -> None:
    await a_ledger(plane)
    file = tmp_path / f"ledger.{form}"
    text = await export(plane, form)
    assert faults_of(file, text) == []
    check = verify.Check(str(file), 2)
    assert check.run() == []
    assert len(check.keys) == 1
    now = utc_now().timestamp()
    for start_s, end_s in (
        (now - 95, now - 75),
        (now - 85, None),
        (now - 6 * DAY_S, now - 85),
        (None, now - 5.5 * DAY_S),
    ):
        period = {
            name: datetime.fromtimestamp(at, UTC).isoformat()
            for name, at in (("start", start_s), ("end", end_s))
            if at is not None
        }
        assert faults_of(file, await export(plane, form, **period)) == [], period


def test_the_file_runs_alone(exported, tmp_path: Path) -> None:
    (tmp_path / "ledger.csv").write_text(exported["csv"])
    program = shutil.copy(verify.__file__, tmp_path / "verify.py")
    command = [sys.executable, "-I", "-S", program, "ledger.csv"]
    done = subprocess.run(command, cwd=tmp_path, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("right: nothing was changed, added or left out\n")
    wrong = subprocess.run([*command, "ab" * 32], cwd=tmp_path, capture_output=True, text=True)
    assert wrong.returncode == 1
    assert "it is signed by" in wrong.stdout


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_lines_that_would_end_beyond_the_file_are_no_wait_without_end(exported, tmp_path: Path, form: str) -> None:
    assert faults_of(tmp_path / "cut", re.sub("lines_end [0-9]+", "lines_end 99999999", exported[form]))


async def test_whoever_is_no_operator_gets_no_seals(plane) -> None:
    answer = await plane.http.get("/v1/reports/lines", params={"seals": "true"}, headers=service_headers(USER))
    assert answer.status_code == 403


@pytest.fixture
async def exported(plane) -> dict[str, str]:
    await a_ledger(plane)
    return {form: await export(plane, form) for form in ("csv", "jsonl")}


def changed(text: str, data: st.DataObject) -> str:
    """Return a text with one line changed, removed, repeated or moved, or one character of it another."""
    lines = text.splitlines(keepends=True)
    what = data.draw(st.sampled_from(["digit", "digit", "digit", "remove", "repeat", "swap", "unsign"]))
    has_digits = [at for at, line in enumerate(lines) if re.search("[0-9a-f]", line)]
    at = data.draw(st.sampled_from(has_digits) if what == "digit" else st.integers(0, len(lines) - 1))
    if what == "remove":
        del lines[at]
    elif what == "repeat":
        lines.insert(at, lines[at])
    elif what == "unsign":
        at = data.draw(st.sampled_from([at for at, line in enumerate(lines) if re.search(SIGNED, line)]))
        lines[at] = re.sub(SIGNED, r"\1 - - ", lines[at])
    elif what == "swap":
        other = data.draw(st.integers(0, len(lines) - 1).filter(lambda each: lines[each] != lines[at]))
        lines[at], lines[other] = lines[other], lines[at]
    else:
        marks = [place for place, letter in enumerate(lines[at]) if letter in "0123456789abcdef"]
        place = data.draw(st.sampled_from(marks))
        letter = data.draw(st.sampled_from("0123456789").filter(lambda each: each != lines[at][place]))
        lines[at] = lines[at][:place] + letter + lines[at][place + 1 :]
    return "".join(lines)


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_any_change_is_found(exported, tmp_path_factory: pytest.TempPathFactory, form: str) -> None:
    path = tmp_path_factory.mktemp("changed") / f"ledger.{form}"

    @given(st.data())
    @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
    def check(data: st.DataObject) -> None:
        assert faults_of(path, changed(exported[form], data))

    check()


FORGED = [
    ("a line's energy", lambda row: {**row, "gpu_energy_j": "1"}),
    ("a line's owner", lambda row: {**row, "job_id": "job_x"}),
    ("a line's meter", lambda row: {**row, "provider": "another"}),
    ("a line that is left out", lambda row: None),
]


@pytest.mark.parametrize(("what", "forge"), FORGED, ids=[what for what, _ in FORGED])
async def test_what_is_changed_in_the_database_is_found_although_the_export_is_signed(
    plane, tmp_path: Path, what: str, forge: Any
) -> None:
    """Whoever can write to the database has no key, and cannot make the hashes of days fit again."""
    await a_ledger(plane)
    async with plane.database.transaction() as connection:
        await connection.execute("SET LOCAL session_replication_role = replica")
        (row,) = await connection.fetch(
            "SELECT node_id, boot_id, sequence, owner FROM energy_usages u WHERE job_id IS NOT NULL "
            "ORDER BY batch LIMIT 1"
        )
        key = "node_id = $1 AND boot_id = $2 AND sequence = $3 AND owner = $4"
        new = forge({})
        if new is None:
            await connection.execute(f"DELETE FROM energy_usages WHERE {key}", *row)
        else:
            ((name, value),) = new.items()
            value = float(value) if name.endswith("_j") else value
            await connection.execute(f"UPDATE energy_usages SET {name} = $5 WHERE {key}", *row, value)
    assert faults_of(tmp_path / "ledger.csv", await export(plane))


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE energy_days SET energy_j = energy_j + 1 WHERE sum_number > 0",
        "DELETE FROM energy_days WHERE sum_number = 2",
        "DELETE FROM ledger_sums WHERE number = 2",
        "DELETE FROM ledger_days WHERE number = 2",
        "DELETE FROM ledger_batches WHERE number = 2",
        "UPDATE ledger_batches SET at = at + interval '1 hour'",
        "UPDATE ledger_days SET text = regexp_replace(text, 'lane [0-9]+', 'lane 99')",
        "UPDATE ledger_days SET signature = decode(repeat('00', 64), 'hex')",
        "INSERT INTO energy_usages SELECT (jsonb_populate_record(u, jsonb_build_object('sequence', 999))).* "
        "FROM energy_usages u WHERE batch > 0 LIMIT 1",
        "INSERT INTO energy_usages SELECT (jsonb_populate_record(u, jsonb_build_object('sequence', 999, 'batch', 0, "
        "'start_at', now(), 'end_at', now() + interval '10 s'))).* FROM energy_usages u WHERE batch > 0 LIMIT 1",
    ],
)
async def test_statements_and_sums_cannot_be_changed_in_the_database_either(
    plane, tmp_path: Path, statement: str
) -> None:
    await a_ledger(plane)
    async with plane.database.transaction() as connection:
        await connection.execute("SET LOCAL session_replication_role = replica")
        await connection.execute(statement)
    assert faults_of(tmp_path / "ledger.csv", await export(plane))
