"""Workers sleep while no message waits for them: real processes, and Valkey as Celery fills it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis

from services.kit.celery import TaskLimits, create_celery
from services.kit.queue_keys import UNSETTLED, queue_key
from services.kit.settings import SharedSettings
from services.standalone import dozing, valkey
from services.standalone.dozing import Dozing
from services.standalone.supervisor import Supervisor
from tests.standalone.test_supervisor import a_process, gone, supervised, until
from tests.support.servers import running, scratch_folder

PASSWORD = "a-password"
QUEUES = {"one": ["solves", "lengths"], "two": ["runs"]}
LAST_WORK = "trap 'sleep 1.5; echo {name} >> stopped; exit 0' TERM; touch {name}.ready; while :; do sleep 0.05; done"


class Installation:
    """Two workers, their supervisor, and a Valkey."""

    def __init__(self, supervisor: Supervisor, client: redis.Redis, folder: Path) -> None:
        self.supervisor, self.client, self.folder = supervisor, client, folder

    def state(self, name: str) -> str:
        return next(each.state for each in self.supervisor.status() if each.name == name)

    async def becomes(self, name: str, state: str) -> None:
        await until(lambda: self.state(name) == state)


@asynccontextmanager
async def installed(monkeypatch: pytest.MonkeyPatch, script: str = LAST_WORK) -> AsyncIterator[Installation]:
    monkeypatch.setattr(dozing, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(dozing, "QUIET_S", 0.4)
    with scratch_folder() as folder:
        address = folder / "valkey.sock"
        server = valkey.prepare(folder / "valkey", password=PASSWORD, address=address)
        with running(server), redis.Redis.from_url(valkey.url(PASSWORD, address)) as client:
            async with supervised(folder) as supervisor:
                supervisor.lay_down([a_process(name, folder, script) for name in QUEUES])
                follow = Dozing(QUEUES, functools.partial(dozing.counts, address, PASSWORD), supervisor).follow()
                task = asyncio.create_task(follow)
                try:
                    yield Installation(supervisor, client, folder)
                finally:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)


async def test_a_message_wakes_its_worker_alone_and_quiet_puts_it_to_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    async with installed(monkeypatch) as here:
        await asyncio.sleep(0.5)
        assert {each.state for each in here.supervisor.status()} == {"asleep"}
        assert {each.pid for each in here.supervisor.status()} == {None}
        here.client.lpush(queue_key("lengths"), "a message")
        await here.becomes("one", "running")
        pid = here.supervisor.status()[0].pid
        await asyncio.sleep(1)
        assert (here.supervisor.status()[0].pid, here.state("two")) == (pid, "asleep"), "while its message waits"
        here.client.delete(queue_key("lengths"))
        await here.becomes("one", "asleep")
        assert pid is not None
        assert gone(pid)


async def test_one_that_ends_its_last_work_is_not_killed_and_is_woken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with installed(monkeypatch) as here:
        here.client.lpush(queue_key("runs"), "a message")
        await here.becomes("two", "running")
        here.client.delete(queue_key("runs"))
        await here.becomes("two", "stopping")
        (here.folder / "two.ready").unlink()
        here.client.lpush(queue_key("runs"), "another")
        await here.becomes("two", "running")
        assert (here.folder / "stopped").read_text() == "two\n", "it ended by itself"


async def test_what_is_not_settled_keeps_awake_and_wakes_all_where_nobody_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async with installed(monkeypatch) as here:
        here.client.hset(UNSETTLED, "tag", "a message of a worker that was killed with the installation")
        await here.becomes("one", "running")
        await here.becomes("two", "running")
        await asyncio.sleep(1)
        assert {each.state for each in here.supervisor.status()} == {"running"}
        here.client.delete(UNSETTLED)
        await here.becomes("one", "asleep")
        await here.becomes("two", "asleep")


async def test_a_valkey_that_does_not_answer_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def counts(commands: object) -> list[int]:
        raise ConnectionError("it closed the connection without an answer")

    async with installed(monkeypatch) as here:
        here.client.lpush(queue_key("runs"), "a message")
        await here.becomes("two", "running")
        blind = asyncio.create_task(Dozing(QUEUES, counts, here.supervisor).follow())
        await asyncio.sleep(1)
        assert (here.state("one"), here.state("two"), blind.done()) == ("asleep", "running", False)
        blind.cancel()


async def test_what_is_said_meanwhile_a_sleeper_knows_when_it_wakes(tmp_path: Path) -> None:
    script = 'echo "$WORD" > said; ' + LAST_WORK
    async with supervised(tmp_path) as supervisor:
        supervisor.lay_down([a_process("one", tmp_path, script)])
        await supervisor.replace("one", {"WORD": "changed"})
        assert supervisor.status()[0].state == "asleep"
        await supervisor.set_running("one", True)
        await until(lambda: supervisor.status()[0].state == "running")
        assert (tmp_path / "said").read_text() == "changed\n"


def test_celery_keeps_messages_where_they_are_looked_for() -> None:
    with scratch_folder() as folder:
        address = folder / "valkey.sock"
        url = valkey.url(PASSWORD, address)
        with running(valkey.prepare(folder / "valkey", password=PASSWORD, address=address)):
            app = create_celery("runs", SharedSettings(redis_url=url, service_token="s" * 32), TaskLimits(10, 20))
            app.send_task("a.task", args=["an-id"])
            asked = [("LLEN", queue_key("runs")), ("HLEN", UNSETTLED)]
            assert asyncio.run(dozing.counts(address, PASSWORD, asked)) == [1, 0]
            with app.connection() as connection:
                taken = connection.SimpleQueue("runs").get()
                assert asyncio.run(dozing.counts(address, PASSWORD, asked)) == [0, 1]
                taken.ack()
            assert asyncio.run(dozing.counts(address, PASSWORD, asked)) == [0, 0]
            with pytest.raises(ValueError, match="invalid literal"):
                asyncio.run(dozing.counts(address, "another", asked))
