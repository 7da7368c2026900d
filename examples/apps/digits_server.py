"""A real application in variants: handwritten digits, read by models of different size that run on the processor.

GET  /v2/health/live, /v2/health/ready     200 once it is trained, 503 before
GET  /v2/models/NAME, .../ready            the Open Inference Protocol v2, whatever NAME is
POST /v2/models/NAME/infer                 images as FP32 [n, 64], 0 to 16 for each of 8 x 8 pixels; the digits as INT64

`$WATTSHIFT_VARIANT` is `small` (16 pixels, no hidden layer), `medium` (64 pixels, none) or `large` (a hidden layer). It
trains on scikit-learn's images when it starts, by NumPy alone, and says on how many of the others it is right:
`--accuracy` prints that for each variant, for the application's spec.

To try it: WATTSHIFT_PORT=8900 WATTSHIFT_VARIANT=large python examples/apps/digits_server.py
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from aiohttp import web
from numpy.typing import NDArray
from sklearn.datasets import load_digits

Floats = NDArray[np.float64]
TRAINED_ON = 1_200
"""Of 1,797 images; accuracy is that on the others."""
PIXELS, DIGITS = 64, 10
STEPS, RATE, MOMENTUM = 300, 0.3, 0.9


@dataclass(frozen=True)
class Size:
    """A variant: whether 2 x 2 pixels are taken together, and its hidden units, 0 for no such layer."""

    is_coarse: bool
    hidden: int


SIZES = {"small": Size(True, 0), "medium": Size(False, 0), "large": Size(False, 64)}


class Model:
    """A softmax classifier, with or without a hidden layer, trained by gradient descent with momentum."""

    def __init__(self, size: Size, images: Floats, digits: NDArray[np.int64]) -> None:
        self._size = size
        rng = np.random.default_rng(1)
        widths = [PIXELS // 4 if size.is_coarse else PIXELS, *([size.hidden] if size.hidden else []), DIGITS]
        self._layers = [rng.normal(0, (2 / n) ** 0.5, (n + 1, m)) for n, m in itertools.pairwise(widths)]
        speed = [np.zeros_like(layer) for layer in self._layers]
        inputs, wanted = self._prepared(images), np.eye(DIGITS)[digits]
        for _ in range(STEPS):
            seen = self._forward(inputs)
            error = (_softmax(seen[-1]) - wanted) / len(inputs)
            for at in reversed(range(len(self._layers))):
                gradient = _with_one(seen[at]).T @ error
                error = (error @ self._layers[at][:-1].T) * (seen[at] > 0)
                speed[at] = MOMENTUM * speed[at] - RATE * gradient
                self._layers[at] += speed[at]

    def read(self, images: Floats) -> NDArray[np.int64]:
        """Return the digits that (n, 64) images show."""
        return self._forward(self._prepared(images))[-1].argmax(axis=1)

    def _prepared(self, images: Floats) -> Floats:
        scaled = images / 16
        return scaled.reshape(-1, 4, 2, 4, 2).mean(axis=(2, 4)).reshape(-1, 16) if self._size.is_coarse else scaled

    def _forward(self, inputs: Floats) -> list[Floats]:
        seen = [inputs]
        for at, layer in enumerate(self._layers):
            sums = _with_one(seen[-1]) @ layer
            seen.append(sums if at == len(self._layers) - 1 else np.maximum(sums, 0))
        return seen


def _with_one(values: Floats) -> Floats:
    return np.hstack([values, np.ones((len(values), 1))])


def _softmax(sums: Floats) -> Floats:
    powers = np.exp(sums - sums.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def trained(variant: str) -> tuple[Model, float]:
    """Return a variant, and its accuracy in per cent."""
    images, digits = load_digits(return_X_y=True)
    model = Model(SIZES[variant], images[:TRAINED_ON], digits[:TRAINED_ON])
    return model, 100 * float(np.mean(model.read(images[TRAINED_ON:]) == digits[TRAINED_ON:]))


class Api:
    """The protocol in front of a model."""

    def __init__(self, variant: str) -> None:
        self.variant = variant
        self.model: Model | None = None

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(client_max_size=64 * 2**20)
        app.add_routes(
            [
                web.get("/v2/health/live", self.live),
                web.get("/v2/health/ready", self.ready),
                web.get("/v2/models/{name}/ready", self.ready),
                web.get("/v2/models/{name}", self.metadata),
                web.post("/v2/models/{name}/infer", self.infer),
            ]
        )
        return app

    async def live(self, request: web.Request) -> web.Response:
        """Say that it runs."""
        return web.json_response({"live": True})

    async def ready(self, request: web.Request) -> web.Response:
        """Say whether it is trained."""
        return web.json_response({"ready": self.model is not None}, status=200 if self.model else 503)

    async def metadata(self, request: web.Request) -> web.Response:
        """Say what goes in and comes out."""
        images = {"name": "images", "datatype": "FP32", "shape": [-1, PIXELS]}
        digits = {"name": "digits", "datatype": "INT64", "shape": [-1]}
        name = request.match_info["name"]
        return web.json_response({"name": name, "platform": "numpy", "inputs": [images], "outputs": [digits]})

    async def infer(self, request: web.Request) -> web.Response:
        """Read the digits."""
        body = await request.read()
        head = request.headers.get("Inference-Header-Content-Length", "")
        try:
            asked = json.loads(body[: int(head)] if head.isdigit() else body)
            (images,) = asked["inputs"]
            data = images["data"] if "data" in images else np.frombuffer(body[int(head) :], dtype="<f4")
            pixels = np.asarray(data, dtype=np.float64).reshape(-1, PIXELS)
        except (ValueError, KeyError, TypeError):
            return web.json_response({"error": f"the body has no FP32 images of {PIXELS} pixels"}, status=400)
        if self.model is None:
            return web.json_response({"error": "the model is being trained"}, status=503)
        digits = await asyncio.to_thread(self.model.read, pixels)
        output = {"name": "digits", "datatype": "INT64", "shape": [len(digits)], "data": digits.tolist()}
        found: dict[str, Any] = {"model_name": request.match_info["name"], "outputs": [output]}
        return web.json_response(found | {"parameters": {"variant": self.variant}})


async def main() -> None:
    """Train, and serve until SIGTERM."""
    parser = argparse.ArgumentParser(description="Handwritten digits, read by models of different size.")
    parser.add_argument("--variant", choices=SIZES, default=os.environ.get("WATTSHIFT_VARIANT", "large"))
    parser.add_argument("--accuracy", action="store_true", help="print the accuracy of each variant, per cent, and end")
    options = parser.parse_args()
    if options.accuracy:
        print(json.dumps({name: round(trained(name)[1], 3) for name in SIZES}))
        return
    port = os.environ.get("WATTSHIFT_PORT") or sys.exit("WATTSHIFT_PORT is not set")
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    api = Api(options.variant)
    runner = web.AppRunner(api.app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "", int(port)).start()
    api.model, accuracy = await asyncio.to_thread(trained, options.variant)
    print(f"{options.variant} serves at port {port}, right for {accuracy:.2f} %", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
