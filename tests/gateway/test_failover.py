"""PostgreSQL fails over to its standby under load: what was accepted is there, once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import asyncpg
import httpx
import pytest

from services.standalone import postgres
from services.standalone.probes import PostgresProbe
from services.standalone.process import Process
from tests.gateway.conftest import Front
from tests.gateway.test_durability import Submitter
from tests.support.control_plane import eventually
from tests.support.ports import Ports
from tests.support.servers import ROOT, running, scratch_folder, tcp_postgres, tcp_postgres_url
from tests.support.services import services

PASSWORD = "secret"


@dataclass
class Pair:
    """A PostgreSQL and the standby for which its commits wait."""

    primary: subprocess.Popen[bytes]
    standby: Process
    ports: tuple[int, int]

    @property
    def url(self) -> str:
        """The address of both, as operators write it."""
        one, other = self.ports
        named = tcp_postgres_url(one, PASSWORD).replace(f":{one}/", f":{one},127.0.0.1:{other}/")
        return f"{named}?target_session_attrs=read-write"

    def fail_over(self) -> None:
        """Kill the primary with all of its sessions, and promote the standby."""
        os.killpg(self.primary.pid, signal.SIGKILL)
        self.primary.wait()
        run_beside(self.standby, "pg_ctl", "promote", "-D", str(self.standby.folder))


def run_beside(server: Process, program: str, *words: str) -> None:
    """Run a program of PostgreSQL's to its end, as the user that the server runs as."""
    options = server.popen_options()
    options["cwd"] = server.folder.parent
    path = Path(server.command[0]).with_name(program)
    subprocess.run([path, *words], check=True, **options)


def a_standby(primary: Process, home: Path, port: int) -> Process:
    """Copy the running primary into a new folder, and return the server to start there."""
    home.mkdir(mode=0o700)
    if account := primary.account:
        os.chown(home, account.user_id, account.group_id)
    data = home / "data"
    assert isinstance(primary.address, tuple)
    source = f"{tcp_postgres_url(primary.address[1], PASSWORD)}?application_name=standby"
    run_beside(
        replace(primary, folder=data),
        "pg_basebackup",
        "-D",
        str(data),
        "-R",
        "-X",
        "stream",
        "-c",
        "fast",
        "-d",
        source,
    )
    at = ("127.0.0.1", port)
    words = [str(data) if word == str(primary.folder) else word for word in primary.command]
    words[-1] = str(port)
    return replace(
        primary,
        command=tuple(words),
        folder=data,
        address=at,
        probe=PostgresProbe(at, postgres.USER, postgres.DATABASE),
    )


async def wait_for_the_standby(port: int) -> None:
    """Have commits wait for the standby from now on, and return once it takes part."""
    connection = await asyncpg.connect(tcp_postgres_url(port, PASSWORD))
    await connection.execute("ALTER SYSTEM SET synchronous_standby_names = 'standby'")
    await connection.execute("SELECT pg_reload_conf()")

    async def takes_part() -> bool:
        return await connection.fetchval("SELECT sync_state FROM pg_stat_replication") == "sync"

    await eventually(takes_part)
    await connection.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    ports = Ports()
    with scratch_folder() as folder, ExitStack() as stack:
        one, other = ports.take(20_500), ports.take(21_500)
        primary = tcp_postgres(folder / "postgres", one, PASSWORD)
        started = stack.enter_context(running(replace(primary, stop_signal=signal.SIGQUIT)))
        environment = {**os.environ, "DATABASE_URL": tcp_postgres_url(one, PASSWORD)}
        subprocess.run([sys.executable, "-m", "migrations"], cwd=ROOT, env=environment, check=True)
        standby = a_standby(primary, (folder / "postgres").resolve().with_name("standby"), other)
        stack.enter_context(running(replace(standby, stop_signal=signal.SIGQUIT)))
        asyncio.run(wait_for_the_standby(one))
        yield Pair(started, standby, (one, other))
    ports.release()


@pytest.mark.slow
async def test_a_promoted_standby_has_all_that_was_accepted_once(pair: Pair, redis_url: str, tmp_path: Path) -> None:
    with (
        services(tmp_path, pair.url, redis_url) as found,
        found.started("services.admission.app") as admission,
        found.started("gateway.app", ready_path="/healthz") as gateway,
    ):
        key = {"authorization": f"Bearer {found.admin_key()}"}
        async with httpx.AsyncClient(base_url=found.urls["GATEWAY"], headers=key, timeout=30) as client:
            front = Front(found, admission, gateway, client, await asyncpg.create_pool(pair.url, min_size=0))
            submitters = [Submitter(front, f"over-{number}", with_keys=True) for number in range(8)]
            tasks = [asyncio.create_task(submitter.run()) for submitter in submitters]

            async def accepted_more() -> None:
                enough = sum(len(submitter.accepted) for submitter in submitters) + 100

                async def are_enough() -> bool:
                    assert not any(task.done() for task in tasks), [task.result() for task in tasks if task.done()]
                    return sum(len(submitter.accepted) for submitter in submitters) >= enough

                await eventually(are_enough)

            await accepted_more()
            await asyncio.to_thread(pair.fail_over)
            await accepted_more()
            for submitter in submitters:
                submitter.enough.set()
            await asyncio.gather(*tasks)
            async with front.database.acquire() as database:
                rows = await database.fetch("SELECT id, name FROM jobs WHERE name LIKE 'over-%'")
            await front.database.close()
    accepted = {name: job_id for submitter in submitters for name, job_id in submitter.accepted.items()}
    assert len(rows) == len({row["name"] for row in rows}), "a submission became two jobs"
    assert accepted.items() <= {row["name"]: row["id"] for row in rows}.items()
