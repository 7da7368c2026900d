"""What clients of a router wait while it is flooded, beside the same flood at a listener that does nothing, in one run.

The flood is that of tests/support/floods.py: 50 headers without end, 5,000 half heads and 200 bodies that drip, from
one process, which opens a closed connection again after 10 s. Other clients ask 20 times a second on 8 connections. All
share the machine's cores, so that what the flood itself takes of them is in both figures. The listener accepts, and
reads what comes. Rounds with either target take turns.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.benchmarks.bench_router import BODY, KEY, PATH, answers, mock, router_environment
from tests.benchmarks.load import Load, measure
from tests.benchmarks.results import write_result
from tests.support.ports import Ports
from tests.support.servers import http_ready, wait_until

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "5"))
DURATION_S = float(os.environ.get("BENCH_DURATION_S", "10"))
WARM_UP_S = 5.0
"""In which the flood begins."""
MOST_TIMES = 2.0
LISTENER = """
import asyncio, sys, uvloop
async def main():
    loop = asyncio.get_running_loop()
    server = await loop.create_server(asyncio.Protocol, "127.0.0.1", int(sys.argv[1]), backlog=2048)
    await server.serve_forever()
uvloop.run(main())
"""


def main() -> int:
    """Measure, print, write JSON; 1 where other clients wait too long."""
    ports = Ports()
    model, router, listener = (ports.take(29_900 + number) for number in range(3))
    p99_ms: dict[str, list[float]] = {"nothing": [], "listener": [], "router": []}
    failed = 0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        start(stack, *mock(model))
        start(stack, "-c", LISTENER, str(listener))
        start(stack, "-m", "services.router.app", **router_environment(folder, model, router, 1))
        wait_until(lambda: answers(model) and http_ready(("127.0.0.1", router)), 300)
        for turn in range(ROUNDS):
            for target in list(p99_ms) if turn % 2 else reversed(p99_ms):
                with ExitStack() as flooding:
                    if target != "nothing":
                        port = router if target == "router" else listener
                        seconds = str(WARM_UP_S + DURATION_S + 5)
                        start(flooding, "-m", "tests.support.floods", seconds, f"127.0.0.1:{port}")
                    load = Load("127.0.0.1", router, PATH, KEY, json.dumps(BODY), 8, DURATION_S, WARM_UP_S, 20)
                    load.status = 200
                    result = measure(load)
                failed += result.failed
                p99_ms[target].append(result.p99_ms)
                print(f"flood at {target:8} p50 {result.p50_ms:7.1f} ms  p99 {result.p99_ms:7.1f} ms", flush=True)
                time.sleep(1)
    ports.release()
    times = statistics.median(p99_ms["router"]) / statistics.median(p99_ms["listener"])
    targets = {f"p99 at most {MOST_TIMES:g} times": times <= MOST_TIMES, "nothing refused": not failed}
    figures: dict[str, Any] = {"p99_ms": p99_ms, "times": times, "failed": failed, "targets": targets}
    print(json.dumps(figures, indent=2))
    write_result("floods", figures)
    return 0 if all(targets.values()) else 1


def start(stack: ExitStack, *arguments: str, **environment: str) -> None:
    """Run a Python process until the end of the block."""
    process = subprocess.Popen([sys.executable, *arguments], env=os.environ | environment, stdout=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.kill)


if __name__ == "__main__":
    sys.exit(main())
