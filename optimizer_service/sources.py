"""Data that a request may refer to instead of containing it."""

from services.contracts.carbon import Clock, IntensityForecast
from services.contracts.codes import ProblemCode
from services.contracts.problems import FieldError
from services.core.domain.carbon import Signal
from services.kit.carbon import Carbon
from services.kit.problems import ProblemError


class Sources:
    """What ``SolveKind.resolve`` may read from the other services."""

    def __init__(self, carbon: Carbon) -> None:
        self._carbon = carbon

    async def forecast(self, zone: str, signal: Signal | None, horizon_s: float, clock: Clock) -> IntensityForecast:
        """Return intensities from now on, ``horizon_s`` seconds of ``clock`` ahead.

        Raises:
            ProblemError: 422 for an unknown zone or signal; 503 while the carbon service does not answer.
        """
        try:
            return await self._carbon.forecast(zone, horizon_s, clock, signal)
        except ProblemError as error:
            pointer = {404: "/zone", 422: "/horizon_h"}.get(error.status)
            if pointer is None:
                raise
            if signal and error.problem_code is not ProblemCode.UNKNOWN_ZONE and error.status == 404:
                pointer = "/signal"
            errors = [FieldError(pointer=pointer, detail=error.detail)]
            raise ProblemError(422, error.problem_code, error.detail, errors=errors) from error
