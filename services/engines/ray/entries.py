"""What jobs' entry points (``wattshift.ray``) ask the bridge, and the server that answers them."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Literal, Self

from aiohttp import web
from pydantic import Field, ValidationError, model_validator

from services.contracts.schema import Instant, NodeMessage, Text, maybe, said
from services.kit.bridges.figures import served
from services.kit.logging import Log

log = Log(__name__)

Gpus = Annotated[int, Field(ge=1, le=65_536)]


class Entry(NodeMessage):
    """The state of a job's entry point, and what its user wants for it."""

    state: Literal["waits", "starts", "runs", "stops"]
    run: int = said("How often its command has been started.", ge=0, lt=2**31)
    began_at: Instant | None = maybe("When this run has begun; null while there is none.")
    nodes: dict[Text, Annotated[int, Field(ge=0, le=65_536)]] = said(
        "GPUs that its placement group has, by Ray's ids of nodes."
    )
    gpus: Gpus
    max_gpus: Gpus
    step_gpus: Gpus = 1
    gpu_model: Text | None = Field(default=None, max_length=63)
    steer: bool = True
    stoppable: bool = False
    deadline: Instant | None = None
    flexible_s: float | None = Field(default=None, ge=0, le=1e8)
    time_limit_s: float | None = Field(default=None, gt=0, le=1e9)

    @property
    def is_running(self) -> bool:
        """Whether its command is alive."""
        return self.state in ("runs", "stops")

    @model_validator(mode="after")
    def _has_sizes(self) -> Self:
        if self.max_gpus < self.gpus or (self.max_gpus - self.gpus) % self.step_gpus:
            raise ValueError("no gang has these sizes")
        if self.is_running and not self.run:
            raise ValueError("what runs has been started")
        return self


class Told(NodeMessage):
    """What an entry point should do."""

    action: Literal["hold", "run", "stop"]
    gpus: int | None = None
    zone: str | None = None
    grace_s: float = 0.0
    note: str = ""
    again_s: float  #: When it should ask again
    for_s: float  #: How long this holds if nobody answers then; after that it starts by itself


@asynccontextmanager
async def listening(address: str, told: Callable[[str, Entry], Told]) -> AsyncGenerator[str]:
    """Answer entry points during the block; yield the address; ``OSError`` if something else listens there."""

    async def answer(request: web.Request) -> web.Response:
        try:
            entry = Entry.model_validate_json(await request.read())
        except ValidationError as error:
            problem = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            return web.Response(status=422, text=problem)
        return web.Response(
            text=told(request.match_info["name"], entry).model_dump_json(), content_type="application/json"
        )

    app = web.Application(client_max_size=1 << 20)
    app.router.add_post("/v1/entries/{name}", answer)
    async with served(app, address):
        log.info("entries.heard", address=address)
        yield f"http://{address}"
