"""A stand-in for an image model: a variant with the timing and power of a measured one, without a model or a GPU.

GET  /v2/health/live, /v2/health/ready     200 once it has loaded, 503 before
GET  /v2/models/NAME, .../ready            the Open Inference Protocol v2, whatever NAME is
POST /v2/models/NAME/infer                 a made-up label, with the variant and the slice that it came from
POST /stand-in                             change how it misbehaves (below), as JSON; GET shows it
anything else                              plain HTTP: a JSON object with the same, and the size of the body
SIGTERM                                    it exits at once, whatever it holds

It serves one request at a time, in the order of their arrival, and each takes as long as the variant
`$WATTSHIFT_VARIANT` takes on a slice `$WATTSHIFT_SLICE` of an H200, by the measured profile in `efficientnet.json`.
Each second it reports its load, by which a simulated GPU draws what the real one drew. A client that leaves ends its
request.

To try it: WATTSHIFT_PORT=8900 WATTSHIFT_VARIANT=b7 WATTSHIFT_SLICE=2g python examples/apps/variant_server.py
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from services.core.domain.gpus import gpu_model

MEASURED = Path(__file__).with_name("efficientnet.json")  #: ``lab/inference/profiles.py`` writes it
LABELS = ("wind turbine", "solar panel", "dam", "chimney", "pylon", "battery", "geyser", "barge")
REPORT_S = 1.0
BODY_BYTES = 64 * 2**20
WHOLE = 7


@dataclass(frozen=True)
class Timing:
    """How a variant behaves on a slice.

    Attributes:
        service_s, jitter_s: Mean service time, and its standard deviation.
        gpu_load: Load of the slice while it works, 0 to 1, by which a simulated GPU draws the measured power.
    """

    service_s: float
    jitter_s: float
    gpu_load: float


@dataclass
class Misbehaviour:
    """What a test may want to go wrong.

    Attributes:
        slow: Times are multiplied by this.
        hang: Requests get no answer.
        fail_status: Requests get this status.
        drop: Connections are closed without an answer.
        unhealthy: It says that it is not ready.
    """

    slow: float = 1.0
    hang: bool = False
    fail_status: int | None = None
    drop: bool = False
    unhealthy: bool = False


def timing_of(variant: str, slice_name: str, model: str) -> Timing:
    """Return the measured timing of a variant on a slice; exit with a line that says what there is."""
    known: dict[str, dict[str, Any]] = json.loads(MEASURED.read_bytes())
    if variant not in known or slice_name not in known[variant]["slices"]:
        slices = dict.fromkeys(name for of in known.values() for name in of["slices"])
        sys.exit(f"EfficientNet has the variants {', '.join(known)} on the slices {', '.join(slices)}")
    at, board = known[variant]["slices"][slice_name], gpu_model(model)
    share = int(slice_name[0]) / WHOLE
    gpu_load = at["busy_w"] / ((board.peak_w - board.idle_w) * share)
    return Timing(at["service_s"], at["jitter_s"], min(gpu_load, 1.0))


class Instance:
    """The variant at work: one request at a time."""

    def __init__(self, timing: Timing, load_s: float, slower: float) -> None:
        self.timing, self.slower = timing, slower
        self.misbehaviour = Misbehaviour()
        self.ready_at_s = time.monotonic() + load_s
        self.served = 0
        self._one_at_a_time = asyncio.Lock()
        self._busy_since_s: float | None = None
        self._busy_s = 0.0
        self._reported_s = time.monotonic()
        self._random = random.Random(os.getpid())

    @property
    def is_ready(self) -> bool:
        return time.monotonic() >= self.ready_at_s and not self.misbehaviour.unhealthy

    async def work(self) -> None:
        """Take as long as the variant does, once those before are done."""
        async with self._one_at_a_time:
            self._busy_since_s = time.monotonic()
            drawn_s = self.timing.service_s + self.timing.jitter_s * max(-3.0, min(self._random.gauss(0, 1), 3.0))
            try:
                await asyncio.sleep(drawn_s * self.slower * self.misbehaviour.slow)
                self.served += 1
            finally:
                self._busy_s += time.monotonic() - self._busy_since_s
                self._busy_since_s = None

    def load(self) -> float:
        """Return the load of its slice since the last call."""
        now_s = time.monotonic()
        busy_s, elapsed_s = self._busy_s, now_s - self._reported_s
        if self._busy_since_s is not None:
            busy_s += now_s - self._busy_since_s
            self._busy_since_s = now_s
        self._busy_s, self._reported_s = 0.0, now_s
        return self.timing.gpu_load * min(busy_s / elapsed_s, 1.0) if elapsed_s > 0 else 0.0

    async def report(self, path: Path) -> None:
        """Write the load into the job's progress file each second, for ever."""
        while True:
            await asyncio.sleep(REPORT_S)
            with contextlib.suppress(OSError):  # in place: the job may write this file, but not into its folder
                path.write_text(json.dumps({"gpu_load": round(self.load(), 4)}) + "\n")


class Api:
    """Both protocols in front of the variant."""

    def __init__(self, instance: Instance, variant: str, slice_name: str) -> None:
        self.instance, self.variant, self.slice_name = instance, variant, slice_name

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(client_max_size=BODY_BYTES)
        app.add_routes(
            [
                web.get("/v2/health/live", self.live),
                web.get("/v2/health/ready", self.ready),
                web.get("/v2/models/{name}/ready", self.ready),
                web.get("/v2/models/{name}", self.metadata),
                web.post("/v2/models/{name}/infer", self.infer),
                web.get("/v2/models/{name}/versions/{version}", self.metadata),
                web.post("/v2/models/{name}/versions/{version}/infer", self.infer),
                web.get("/stand-in", self.show_misbehaviour),
                web.post("/stand-in", self.misbehave),
                web.route("*", "/{path:.*}", self.plain),
            ]
        )
        return app

    async def live(self, request: web.Request) -> web.Response:
        """Say that it runs."""
        return web.json_response({"live": True})

    async def ready(self, request: web.Request) -> web.Response:
        """Say whether it serves."""
        return web.json_response({"ready": self.instance.is_ready}, status=200 if self.instance.is_ready else 503)

    async def metadata(self, request: web.Request) -> web.Response:
        """Say what goes in and comes out."""
        images = {"name": "image", "datatype": "FP32", "shape": [-1, -1]}
        labels = {"name": "label", "datatype": "BYTES", "shape": [-1]}
        found = {"name": request.match_info["name"], "versions": ["1"], "platform": "stand-in"}
        return web.json_response(found | {"inputs": [images], "outputs": [labels]})

    async def infer(self, request: web.Request) -> web.Response:
        """Label the images: the first dimension of the first input says how many there are."""
        body = await request.read()
        head = request.headers.get("Inference-Header-Content-Length", "")
        try:
            asked = json.loads(body[: int(head)] if head.isdigit() else body)
            first = asked["inputs"][0]
            count = int(first["shape"][0])
        except (ValueError, KeyError, IndexError, TypeError):
            return web.json_response({"error": "the body has no inputs with a shape"}, status=400)
        if not 1 <= count <= 1_000:
            return web.json_response({"error": "the first dimension must be between 1 and 1000"}, status=400)
        if (failure := await self._misbehaved(request)) is not None:
            return failure
        await self.instance.work()
        labels = [LABELS[zlib.crc32(body + bytes([at % 256])) % len(LABELS)] for at in range(count)]
        answer: dict[str, Any] = {
            "model_name": request.match_info["name"],
            "model_version": request.match_info.get("version", "1"),
            "outputs": [{"name": "label", "datatype": "BYTES", "shape": [count], "data": labels}],
            "parameters": {"variant": self.variant, "slice": self.slice_name},
        }
        return web.json_response(answer | ({"id": asked["id"]} if "id" in asked else {}))

    async def plain(self, request: web.Request) -> web.StreamResponse:
        """Answer any other request."""
        body = await request.read()
        if (failure := await self._misbehaved(request)) is not None:
            return failure
        await self.instance.work()
        label = LABELS[zlib.crc32(body) % len(LABELS)]
        found = {"label": label, "bytes": len(body), "variant": self.variant, "slice": self.slice_name}
        return web.json_response(found | {"method": request.method, "path": request.path})

    async def _misbehaved(self, request: web.Request) -> web.Response | None:
        wrong = self.instance.misbehaviour
        if wrong.hang:
            await asyncio.sleep(3_600)
        if wrong.drop and request.transport is not None:
            request.transport.abort()
        if wrong.fail_status is not None:
            return web.json_response({"error": "it fails on purpose"}, status=wrong.fail_status)
        return None

    async def show_misbehaviour(self, request: web.Request) -> web.Response:
        """Show what goes wrong on purpose."""
        return web.json_response(asdict(self.instance.misbehaviour) | {"served": self.instance.served})

    async def misbehave(self, request: web.Request) -> web.Response:
        """Change what goes wrong on purpose."""
        known = asdict(self.instance.misbehaviour)
        try:
            asked = json.loads(await request.read())
            unknown = sorted(set(asked) - set(known))
            self.instance.misbehaviour = Misbehaviour(**(known | asked)) if not unknown else self.instance.misbehaviour
        except (ValueError, TypeError):
            return web.json_response({"error": "the body is not a JSON object"}, status=400)
        if unknown:
            return web.json_response({"error": f"unknown option {unknown[0]}"}, status=400)
        return await self.show_misbehaviour(request)


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description="A stand-in for an image model.")
    parser.add_argument("--host", default="", help="address to listen at; by default all")
    parser.add_argument("--variant", default=os.environ.get("WATTSHIFT_VARIANT", "b1"))
    parser.add_argument("--slice", default=os.environ.get("WATTSHIFT_SLICE", "7g"))
    parser.add_argument("--gpu-model", default="H200", help="of the simulated GPU that draws the power")
    parser.add_argument("--load-s", type=float, default=1.0, help="how long loading the model takes")
    parser.add_argument("--slower", type=float, default=1.0, help="how many times slower than measured")
    return parser.parse_args(arguments)


async def serve(api: Api, host: str, port: int) -> None:
    """Serve until the process ends."""
    runner = web.AppRunner(api.app(), handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port, backlog=1_024).start()
    print(f"{api.variant} on {api.slice_name} serves at port {port}", flush=True)
    progress = os.environ.get("WATTSHIFT_PROGRESS_FILE")
    await (api.instance.report(Path(progress)) if progress else asyncio.Event().wait())


async def main() -> None:
    """Serve until SIGTERM."""
    options = parsed()
    port = os.environ.get("WATTSHIFT_PORT") or sys.exit("WATTSHIFT_PORT is not set")
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    timing = timing_of(options.variant, options.slice, options.gpu_model)
    instance = Instance(timing, options.load_s, options.slower)
    await serve(Api(instance, options.variant, options.slice), options.host, int(port))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
