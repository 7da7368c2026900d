"""The endpoint picker beside a bare gRPC echo, in turns of one run: picks a second of a core.

Both are asked the same four messages a request, as a gateway's are with bodies in pieces: head and body of the request,
head and body of the answer. The echo reads each and writes one of the same size; no other work is in it. The gateway
runs on core 0, what is measured on core 1; what counts is the processor time that each of them takes.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import grpc.aio

from services.router.picking.protocol import FULL_DUPLEX, METHOD, SERVICE, Said
from tests.benchmarks.bench_router import BODY, KEY, PATH, answers, cpu_s, mock, process, router_environment
from tests.benchmarks.results import write_result
from tests.support.ports import Ports
from tests.support.servers import http_ready, wait_until

TURNS, TURN_S, AT_ONCE = 8, 1.0, 32
LEAST_OF_ECHO, LEAST_PER_S = 0.70, 1_000
ECHO = ["-m", "tests.benchmarks.bench_picker", "--echo"]


def main() -> int:
    """Measure, print, write JSON; 1 where a target is missed."""
    if sys.argv[1:2] == ["--echo"]:
        asyncio.run(echo(int(sys.argv[2])))
        return 0
    ports = Ports()
    mock_port, router_port, picker_port, echo_port = (ports.take(29_840 + number) for number in range(4))
    with tempfile.TemporaryDirectory() as folder, process(mock(mock_port), {}, core="0"):
        wait_until(lambda: answers(mock_port))
        environment = router_environment(Path(folder), mock_port, router_port, 1)
        environment["ROUTER_PICKER_PORT"] = str(picker_port)
        with (
            process(["-m", "services.router.app"], environment, core="1") as pid,
            process([*ECHO, str(echo_port)], {}, core="1") as echo_pid,
        ):
            wait_until(lambda: http_ready(("127.0.0.1", router_port)))
            os.sched_setaffinity(0, {0})
            used = asyncio.run(in_turns({"picker": (picker_port, pid), "echo": (echo_port, echo_pid)}))
    ports.release()
    per_s = {name: asked / cpu for name, (asked, cpu) in used.items()}
    share = per_s["picker"] / per_s["echo"]
    targets = {
        f"at least {LEAST_OF_ECHO:.0%} of a bare echo": share >= LEAST_OF_ECHO,
        f"at least {LEAST_PER_S}/s of a core": per_s["picker"] >= LEAST_PER_S,
    }
    figures = {"per_cpu_s": per_s, "share_of_echo": share, "targets": targets}
    print(json.dumps(figures, indent=2))
    write_result("picker", figures)
    return 0 if all(targets.values()) else 1


async def in_turns(servers: dict[str, tuple[int, int]]) -> dict[str, tuple[int, float]]:
    """Return how many requests each server answered, and the seconds of processor time that took it."""
    used = dict.fromkeys(servers, (0, 0.0))
    for number in range(TURNS * len(servers) + len(servers)):
        name = list(servers)[number % len(servers)]
        port, pid = servers[name]
        began = cpu_s(pid)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            process_ = channel.stream_stream(f"/{SERVICE}/{METHOD}")
            end_s = asyncio.get_running_loop().time() + TURN_S
            counts = await asyncio.gather(*(ask(process_, end_s) for _ in range(AT_ONCE)))
        if number >= len(servers):  # the first turn of each only warms it up
            asked, cpu = used[name]
            used[name] = asked + sum(counts), cpu + cpu_s(pid) - began
    return used


async def ask(process_: Any, end_s: float) -> int:
    """Ask one request after another; return how many."""
    messages = [each.SerializeToString() for each in exchange()]
    count = 0
    while asyncio.get_running_loop().time() < end_s:
        call = process_()
        for half in (messages[:2], messages[2:]):
            for each in half:
                await call.write(each)
            for _ in half:
                assert await call.read() is not grpc.aio.EOF
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        count += 1
    return count


def exchange() -> list[Any]:
    """Return what a gateway says of one request and its answer."""
    head, body, answer_head, answer = (Said() for _ in range(4))
    head.protocol_config.request_body_mode = head.protocol_config.response_body_mode = FULL_DUPLEX
    sent = {":method": "POST", ":path": PATH, "authorization": f"Bearer {KEY}", "content-type": "application/json"}
    for name, value in sent.items():
        head.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    body.request_body.body, body.request_body.end_of_stream = json.dumps(BODY).encode(), True
    for name, value in {":status": "200", "content-type": "application/json"}.items():
        answer_head.response_headers.headers.headers.add(key=name, raw_value=value.encode())
    usage = {"prompt_tokens": 8, "completion_tokens": 1, "total_tokens": 9}
    document = {"id": "c1", "object": "chat.completion", "model": BODY["model"], "choices": [], "usage": usage}
    answer.response_body.body, answer.response_body.end_of_stream = json.dumps(document).encode(), True
    return [head, body, answer_head, answer]


async def echo(port: int) -> None:
    """Serve the bare echo."""

    async def process_(_: object, context: Any) -> None:
        while (said := await context.read()) is not grpc.aio.EOF:
            await context.write(said)

    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(process_)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    sys.exit(main())
