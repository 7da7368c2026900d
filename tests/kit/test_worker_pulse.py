"""A worker's connection to its broker."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from redis import Redis

from services.kit.celery import TaskLimits, create_celery
from services.kit.settings import SharedSettings
from services.standalone.process import Process
from tests.support.servers import running, wait_until

TOKEN = "x" * 40
LIMITS = TaskLimits(soft_s=30, hard_s=60)
WORKER = f"""
import os
from kombu.transport.redis import QoS
from redis import Redis
from services.kit.celery import TaskLimits, create_celery
from services.kit.settings import SharedSettings
from services.kit.worker_pulse import add_pulse

app = create_celery("settled", SharedSettings(), {LIMITS})
add_pulse(app)
acknowledge, cut = QoS.ack, [ConnectionResetError("cut")]

def acknowledge_but_once(self, tag):
    if cut:
        raise cut.pop()
    acknowledge(self, tag)

QoS.ack = acknowledge_but_once

@app.task(name="note")
def note(number):
    Redis.from_url(os.environ["REDIS_URL"]).rpush("noted", number)

app.worker_main(["worker", "--concurrency", "1", "--loglevel", "WARNING"])
"""


def noted(redis: Redis) -> set[bytes]:
    return set(redis.lrange("noted", 0, -1))  # type: ignore[arg-type]  # redis-py has one type for both its clients


async def test_a_worker_that_could_not_settle_a_message_takes_the_next(redis_url: str, tmp_path: Path) -> None:
    settings = SharedSettings(redis_url=redis_url, service_token=TOKEN)  # type: ignore[call-arg]
    app = create_celery("settled", settings, LIMITS)
    for number in range(3):
        app.send_task("note", args=[number])
    environment = {"REDIS_URL": redis_url, "WATTSHIFT_SERVICE_TOKEN": TOKEN}
    worker = Process(name="worker", command=(sys.executable, "-c", WORKER), environment=environment, folder=tmp_path)
    with running(worker), Redis.from_url(redis_url) as redis:
        await asyncio.to_thread(wait_until, lambda: noted(redis) == {b"0", b"1", b"2"})
