"""Inputs that a request may name instead of sending: the jobs that ran here, and the measured intensity of a grid."""

from datetime import UTC, datetime

from services.contracts.identity import Identity
from services.contracts.problems import FieldError
from services.contracts.reports import PastJobs
from services.contracts.simulations import LIVE
from services.core.domain.carbon import Signal
from services.kit.carbon import Carbon, TooManyPointsError
from services.kit.http import ServiceClient
from services.kit.problems import ProblemError
from services.simulator.training import Content, OptionError

PAGE_JOBS = 1_000


class Sources:
    """Reads from other services."""

    def __init__(self, telemetry: ServiceClient, carbon: Carbon, scheduler: ServiceClient) -> None:
        self._telemetry, self._carbon, self._scheduler = telemetry, carbon, scheduler

    async def past_jobs(self, caller: Identity, start_s: float, end_s: float, most: int) -> Content:
        """Return the jobs submitted in ``[start_s, end_s)``, UTC seconds, that the caller may see, as JSON lines.

        Raises:
            OptionError: There are more than ``most``.
            ProblemError: 503 while telemetry does not answer.
        """
        moments = (datetime.fromtimestamp(at_s, UTC).isoformat().replace("+00:00", "Z") for at_s in (start_s, end_s))
        params: dict[str, str | int | float] = {**dict(zip(("start", "end"), moments, strict=True)), "limit": PAGE_JOBS}
        lines: list[str] = []
        while True:
            page = await self._telemetry.call("GET", "/v1/reports/history", PastJobs, params=params, identity=caller)
            lines += [job.model_dump_json() for job in page.items]
            if len(lines) > most:
                raise OptionError("days", f"more than {most} jobs were submitted in these days; ask for fewer days")
            if page.next_cursor is None:
                return Content("history", "\n".join(lines).encode())
            params["cursor"] = page.next_cursor

    async def intensities(self, zone: str, signal: Signal, start_s: float, end_s: float) -> Content:
        """Return a zone's measured intensities in ``[start_s, end_s)``, UTC seconds: two columns, time and gCO2/kWh.

        Raises:
            OptionError: There are more values than a run may have.
            ProblemError: 422 for an unknown zone or signal; 503 while the carbon service does not answer.
        """
        try:
            history = await self._carbon.history(zone, start_s, end_s, signal)
        except TooManyPointsError as error:
            raise OptionError("days", f"{error.detail} Ask for fewer days") from error
        except ProblemError as error:
            if error.status not in (404, 422):
                raise
            errors = [FieldError(pointer="/carbon", detail=error.detail)]
            raise ProblemError(422, error.problem_code, error.detail, errors=errors) from error
        lines = [f"{point.start_at.isoformat()},{point.gco2_per_kwh!r}" for point in history.points]
        return Content(zone, "\n".join(["time,gco2_per_kwh", *lines]).encode())

    async def live(self, caller: Identity) -> Content:
        """Return the scheduler's ``LiveState``, as JSON; ``ProblemError``: 503 while it does not answer."""
        return Content(LIVE, await self._scheduler.request("GET", "/internal/live", identity=caller))
