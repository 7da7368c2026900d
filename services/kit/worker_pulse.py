"""What a Celery worker lacks: a pulse from its event loop, and a new connection if a message could not be settled."""

# Celery has no type stubs.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportOptionalSubscript=false, reportOptionalMemberAccess=false, reportUntypedBaseClass=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false

from typing import Any

from celery import Celery
from celery.bootsteps import StartStopStep
from celery.worker.consumer import Consumer

from services.kit.pulse import EVERY_S, Pulse


def add_pulse(app: Celery) -> None:
    app.conf.worker_consumer = PatientConsumer
    app.steps["worker"].add(_Beating)
    app.pulse = Pulse()


class PatientConsumer(Consumer):
    """Keeps the pulse while it tries to reach the broker and the event loop does not run.

    It reconnects if it could not tell the broker that a message is settled. Celery only logs that, and the message
    counts as being worked on for as long as the connection lives: a worker that takes one at a time would take no more.
    """

    def call_soon_ack(self, p: Any, *args: Any, **kwargs: Any) -> Any:
        """Have the event loop settle a message; ``p`` is the message's own method."""

        def settle() -> None:
            p(*args, **kwargs)
            if not p.__self__.acknowledged:
                raise ConnectionError("the broker was not told that a message is settled")  # the loop hands it on

        return super().call_soon_ack(settle)

    def ensure_connected(self, conn: Any) -> Any:
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
