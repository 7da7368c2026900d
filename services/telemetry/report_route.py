"""The routes on which nodes report: hundreds of requests a second, nearly all of them well-formed."""

import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from services.contracts.invalid import NAME_PATTERN

JSON = "application/json"


class ReportRoute(APIRoute):
    """A route whose parameters are a node's name, a body, and two that depend on the request alone.

    Pydantic reads the body from its bytes and writes the answer, which takes half the time that the framework takes on
    any route. Requests that are not well-formed are left to the framework, so that they are answered as on all routes
    (``tests/telemetry/test_report_route.py``).
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the function that answers a request."""
        usual = super().get_route_handler()
        (field,) = self.dependant.body_params
        body_type: type[BaseModel] = field.field_info.annotation  # pyright: ignore[reportAssignmentType]
        dependencies = {each.name or "": each.call for each in self.dependant.dependencies}
        (path_name,) = (each.name for each in self.dependant.path_params)
        name = re.compile(NAME_PATTERN)

        async def answer(request: Request) -> Response:
            node_id = request.path_params[path_name]
            if not name.fullmatch(node_id) or request.headers.get("content-type") != JSON:
                return await usual(request)
            try:
                body = body_type.model_validate_json(await request.body())
            except ValidationError:
                return await usual(request)
            others = {each: await call(request) for each, call in dependencies.items() if call is not None}
            reply: BaseModel = await self.endpoint(**{path_name: node_id, field.name: body}, **others)
            return Response(reply.model_dump_json(), media_type=JSON)

        return answer
