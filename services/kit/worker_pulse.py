"""The pulse of a Celery worker, beaten by its event loop, whatever its pool's processes are doing."""

# Celery has no type stubs.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportOptionalSubscript=false, reportOptionalMemberAccess=false, reportUntypedBaseClass=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

from celery import Celery
from celery.bootsteps import StartStopStep
from celery.worker.consumer import Consumer

from services.kit.pulse import EVERY_S, Pulse


def add_pulse(app: Celery) -> None:
    """Give the workers of an app a pulse."""
    app.conf.worker_consumer = PatientConsumer
    app.steps["worker"].add(_Beating)
    app.pulse = Pulse()


class PatientConsumer(Consumer):
    """Beats as well while it tries to reach the broker, when the event loop does not turn."""

    def ensure_connected(self, conn: Any) -> Any:
        """Return the connection once it is made."""
        ensure = conn.ensure_connection

        def ensure_and_beat(*arguments: Any, callback: Any = None, **options: Any) -> Any:
            def beat() -> None:
                self.app.pulse.beat()
                if callback:
                    callback()

            return ensure(*arguments, callback=beat, **options)

        conn.ensure_connection = ensure_and_beat
        return super().ensure_connected(conn)


class _Beating(StartStopStep):
    requires = ("celery.worker.components:Hub",)

    def start(self, parent: Any) -> None:
        parent.timer.call_repeatedly(EVERY_S, parent.app.pulse.beat)
