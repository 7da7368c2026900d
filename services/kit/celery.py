"""Celery as this project uses it: one queue per process, small JSON messages that name a row, delivered at least once.

Tasks take ids, may run twice without harm, are enqueued after commit and have time limits; their results live in
Postgres. A message is acknowledged when its task is over, so that of a worker that died returns after the visibility
time-out; kombu looks for such messages every ``interval x throttle`` seconds, by default every hundred.
"""

# Celery and billiard have no type stubs.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedFunctionDecorator=false

import contextlib
import logging
import os
import warnings
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import urlencode

import psutil
from billiard.common import human_status
from billiard.pool import EX_RECYCLE
from billiard.util import get_logger
from celery import Celery
from celery.exceptions import SecurityWarning
from celery.signals import setup_logging, worker_init, worker_process_init, worker_process_shutdown

from services.kit import sentinel, traces, tracing
from services.kit.logging import configure_logging
from services.kit.queue_keys import KEY_PREFIX
from services.kit.settings import SharedSettings


@dataclass(frozen=True)
class TaskLimits:
    """How long a task of a queue may take."""

    soft_s: float  #: After this, ``SoftTimeLimitExceeded`` is raised in the task, as soon as it runs Python
    hard_s: float  #: After this, its process is killed


def broker_url(settings: SharedSettings) -> str:
    """Return the address of the broker; over TLS, it includes how Celery checks the certificate."""
    url = settings.redis_url
    if (found := sentinel.watched(url)) is not None:
        return found.broker_url()
    if url.startswith("unix://"):
        return url.replace("unix://", "redis+socket://", 1).replace("?db=", "?virtual_host=", 1)
    options = settings.tls.redis(url)
    if not url.startswith("rediss://") or "ssl_cert_reqs" in url:
        return url
    return f"{url}{'&' if '?' in url else '?'}{urlencode({'ssl_cert_reqs': 'required', **options})}"


def create_celery(queue: str, settings: SharedSettings, limits: TaskLimits) -> Celery:
    """Return the Celery app of one queue, for publishing to it or working on it."""
    watched = sentinel.watched(settings.redis_url)
    of_sentinels = {} if watched is None else watched.transport_options(settings.tls.redis(settings.redis_url))
    app = Celery(queue, broker=broker_url(settings), set_as_current=False)
    app.conf.update(
        task_default_queue=queue,
        accept_content=["json"],
        task_serializer="json",
        task_ignore_result=True,
        task_acks_late=True,
        task_reject_on_worker_lost=False,  # a task that kills its worker must not do so again at once
        task_soft_time_limit=limits.soft_s,
        task_time_limit=limits.hard_s,
        task_publish_retry_policy={"max_retries": 2, "interval_start": 0.05, "interval_step": 0.1},
        worker_prefetch_multiplier=1,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        worker_enable_remote_control=False,  # workers take instructions from their rows only
        worker_cancel_long_running_tasks_on_connection_loss=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_connection_timeout=2,
        broker_transport_options={
            **of_sentinels,
            "visibility_timeout": limits.hard_s + 60,
            "unacked_restore_interval": 1,
            "unacked_restore_throttle": 1,
            "global_keyprefix": KEY_PREFIX,
            "socket_connect_timeout": 2,
            "socket_timeout": 10,
            "socket_keepalive": True,
        },
        timezone="UTC",
    )
    return app


def leave_process() -> NoReturn:
    """End the worker process that runs a task, and so the task, at once; the worker starts another.

    For a task whose result is no longer needed: a solver in the middle of its work cannot be stopped otherwise.
    Programs that the task runs end with it.
    """
    for program in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            program.kill()
    os._exit(EX_RECYCLE)


def prepare_worker(process: str, settings: SharedSettings, app: Celery) -> None:
    """Give this process's worker the project's logging and a pulse, and make it end with its supervisor."""
    from services.kit.worker_pulse import add_pulse  # the worker's code, which those that only send need not load

    add_pulse(app)
    # Celery warns workers that run as root about unpickling messages; ours are JSON.
    warnings.filterwarnings("ignore", category=SecurityWarning)

    @setup_logging.connect(weak=False)
    def log_as_everyone(**_: Any) -> None:
        configure_logging(process, log_format=settings.log_format, level=settings.log_level)
        get_logger().propagate = True  # what the worker itself logs, in our format
        for chatty in (get_logger().name, "celery.worker.strategy", "celery.app.trace"):
            logging.getLogger(chatty).setLevel(logging.WARNING)  # tasks log more themselves
        logging.getLogger("celery.worker.request").addFilter(_is_news)

    @worker_init.connect(weak=False)
    def end_with_supervisor(**_: Any) -> None:
        from services.kit.app import end_with_parent

        end_with_parent()

    @worker_process_init.connect(weak=False)
    def note_spans(**_: Any) -> None:
        tracing.start(process, settings)  # in the process that runs tasks: a thread of its parent's is not there

    @worker_process_shutdown.connect(weak=False)
    def send_spans(**_: Any) -> None:
        traces.stop()


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for Celery's report that ``leave_process`` ended a process, which is intended."""
    return not (isinstance(record.args, tuple) and any(human_status(EX_RECYCLE) in str(word) for word in record.args))
