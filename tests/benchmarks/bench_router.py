"""The router beside PyPI's other routers, in one run: requests a second, added latency, first bytes, open streams.

Two processes share the machine's cores with what is measured: the load generator, pinned to core 0 with the mock model
server, and the router, pinned to core 1 (`--workers 2`: both). What each of them took of the cores is in the result.
`litellm` and `vllm-router` are installed into folders that the benchmark keeps (``BENCH_PEERS_DIR``), before anything
is measured; one that cannot be installed or does not start in time is left out, with the reason.
``python -m tests.benchmarks.bench_router --install`` only installs, ``--alone`` leaves both out. ``--before FOLDER``
measures the router of another checkout in the same run, and how much of its requests a second are left.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvloop

from tests.benchmarks.load import Load, Result, measure
from tests.benchmarks.mock_model_server import MODEL
from tests.benchmarks.results import write_result
from tests.support.ports import Ports
from tests.support.servers import http_ready, wait_until

KEY = "ws_" + "x" * 43
DURATION_S = float(os.environ.get("BENCH_DURATION_S", "8"))
STREAMS = 2_000
LEAST_PER_S = 3_500
MOST_ADDED_P50_MS, MOST_ADDED_P99_MS, MOST_ADDED_FIRST_MS = 0.8, 2.0, 1.0
MANY_SERVERS = 16
"""Of a class; else there are two."""
LONG_CHARACTERS, LEAST_LONG_PER_S = 400_000, 4
"""Of a prompt of some 100,000 tokens."""
MANY, LONG = f"router, {MANY_SERVERS} servers", "router, prompts of 100,000 tokens"
LEAST_OF_BEFORE = 0.85
PATH = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Say hello to request %d."}], "max_tokens": 1}
LONG_BODY = {"model": MODEL, "messages": [{"role": "user", "content": "%text"}], "max_tokens": 1}
PEERS_DIR = Path(os.environ.get("BENCH_PEERS_DIR", str(Path.home() / ".cache" / "wattshift-bench")))
MOST_INSTALL_S, MOST_START_S = 1_800, 300
PEERS = {
    "litellm": ("litellm[proxy]", ["-m", "litellm.proxy.proxy_cli"]),
    "vllm-router": ("vllm-router", ["-m", "vllm_router.launch_router"]),
}


def main() -> int:
    """Measure, print, write JSON; 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--install", action="store_true", help="only install other routers")
    parser.add_argument("--alone", action="store_true", help="leave other routers out")
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="a checkout whose router is measured as well")
    options = parser.parse_args()
    names = () if options.alone else PEERS
    left_out = {name: reason for name in names if (reason := install(name))}
    if options.install:
        print(json.dumps(left_out or {"installed": list(names)}, indent=2))
        return 1 if left_out else 0
    with tempfile.TemporaryDirectory() as folder:
        figures = run(Path(folder), [name for name in names if name not in left_out], options.before)
    figures |= {name: {"left_out": reason} for name, reason in left_out.items()}
    print(json.dumps(figures, indent=2))
    write_result("router", figures)
    return 0 if all(figures["targets"].values()) else 1


def run(folder: Path, peers: Iterable[str], before: Path | None) -> dict[str, Any]:
    """Return all figures, with those of these other routers, and of the router of another checkout."""
    ports = Ports()
    mock_port, router_port, hold_port, many_port = (ports.take(29_800 + number) for number in range(4))
    figures: dict[str, Any] = {"duration_s": DURATION_S, "cores": os.cpu_count()}
    with process(mock(mock_port), {}, core="0"):
        wait_until(lambda: answers(mock_port))
        figures["direct"] = everything(mock_port)
        for name, workers in (("router", 1), ("router, two workers", 2)):
            environment = router_environment(folder, mock_port, router_port, workers)
            cores = "1" if workers == 1 else "0,1"
            with process(["-m", "services.router.app"], environment, core=cores) as pid:
                wait_until(lambda: http_ready(("127.0.0.1", router_port)))
                figures[name] = everything(router_port, pid, is_whole=workers == 1)
                if workers == 1:
                    figures[LONG] = asdict(one(router_port, connections=4, is_long=True))
        figures |= {name: peer(folder, name, mock_port, router_port) for name in peers}
    with process(mock(many_port, servers=MANY_SERVERS), {}, core="0"):
        wait_until(lambda: answers(many_port))
        with process(
            ["-m", "services.router.app"], router_environment(folder, many_port, router_port, 1), core="1"
        ) as pid:
            wait_until(lambda: http_ready(("127.0.0.1", router_port)))
            figures[MANY] = everything(router_port, pid)
        figures["direct, again"] = everything(many_port)
    if before:
        for servers in (2, MANY_SERVERS):
            with process(mock(mock_port, servers=servers), {}, core="0"):
                wait_until(lambda: answers(mock_port))
                figures[f"before, {servers} servers"] = in_turns(folder, before, mock_port, router_port, many_port)
    with process(mock(hold_port, hold_s=3.0, tokens=3), {}, core="0"):
        wait_until(lambda: answers(hold_port))
        environment = router_environment(folder / "held", hold_port, router_port, 1)
        with process(["-m", "services.router.app"], environment, core="1"):
            wait_until(lambda: http_ready(("127.0.0.1", router_port)))
            figures["open_streams"] = asyncio.run(open_streams(router_port))
    direct, ours = figures["direct"], figures["router"]
    figures["added"] = {
        "p50_ms": ours["at_100_per_s"]["p50_ms"] - direct["at_100_per_s"]["p50_ms"],
        "p99_ms": ours["at_100_per_s"]["p99_ms"] - direct["at_100_per_s"]["p99_ms"],
        "first_byte_p50_ms": ours["first_byte"]["p50_ms"] - direct["first_byte"]["p50_ms"],
    }
    many = figures[MANY]
    figures["added"][f"p50_ms, {MANY_SERVERS} servers"] = (
        many["at_100_per_s"]["p50_ms"] - figures["direct, again"]["at_100_per_s"]["p50_ms"]
    )
    figures["targets"] = {
        f"at least {LEAST_PER_S}/s on one core": ours["closed_32"]["per_s"] >= LEAST_PER_S,
        f"p50 adds at most {MOST_ADDED_P50_MS} ms": figures["added"]["p50_ms"] <= MOST_ADDED_P50_MS,
        f"p99 adds at most {MOST_ADDED_P99_MS} ms": figures["added"]["p99_ms"] <= MOST_ADDED_P99_MS,
        f"first byte adds at most {MOST_ADDED_FIRST_MS} ms": figures["added"]["first_byte_p50_ms"]
        <= MOST_ADDED_FIRST_MS,
        f"{STREAMS} open streams without loss": figures["open_streams"]["complete"] == STREAMS,
        f"at {MANY_SERVERS} servers, p50 adds at most {MOST_ADDED_P50_MS} ms": figures["added"][
            f"p50_ms, {MANY_SERVERS} servers"
        ]
        <= MOST_ADDED_P50_MS,
        f"at least {LEAST_LONG_PER_S}/s at prompts of 100,000 tokens": figures[LONG]["per_s"] >= LEAST_LONG_PER_S,
    }
    if before:
        for servers in (2, MANY_SERVERS):
            share = figures[f"before, {servers} servers"]["share"]
            name = f"{servers} servers: at least {LEAST_OF_BEFORE:.0%} of the requests before, per second of CPU"
            figures["targets"][name] = share >= LEAST_OF_BEFORE
    ports.release()
    return figures


def in_turns(folder: Path, before: Path, mock_port: int, port: int, before_port: int) -> dict[str, float]:
    """Return the processor time of requests to this router and to that of another checkout, microseconds.

    Both run on one core and are given requests in turns of a second, so that what else the machine does meanwhile is
    the same for both.
    """
    ours, theirs = (router_environment(folder / f"at {each}", mock_port, each, 1) for each in (port, before_port))
    router = ["-m", "services.router.app"]
    with process(router, ours, core="1") as pid, process(router, theirs, core="1", folder=before) as before_pid:
        wait_until(lambda: http_ready(("127.0.0.1", port)) and http_ready(("127.0.0.1", before_port)))
        used = {port: [0.0, 0], before_port: [0.0, 0]}
        for number in range(2 * round(DURATION_S)):
            at, at_pid = ((port, pid), (before_port, before_pid))[number % 2]
            began = cpu_s(at_pid)
            used[at][1] += one(at, connections=32, duration_s=1.0).requests
            used[at][0] += cpu_s(at_pid) - began
    us, before_us = (1e6 * used[each][0] / used[each][1] for each in (port, before_port))
    return {"cpu_us_per_request": us, "before_cpu_us_per_request": before_us, "share": before_us / us}


def mock(port: int, *, hold_s: float = 0.0, tokens: int = 2, servers: int = 2) -> list[str]:
    """Return the arguments of a mock model server."""
    return ["-m", "tests.benchmarks.mock_model_server", str(port), str(hold_s), str(tokens), str(servers)]


def router_environment(folder: Path, mock_port: int, port: int, workers: int) -> dict[str, str]:
    """Return the settings of a router whose every neighbour is the mock."""
    mock_url = f"http://127.0.0.1:{mock_port}"
    return {
        "WATTSHIFT_SERVICE_TOKEN": "a-token-for-benchmarks",
        **{f"WATTSHIFT_{name}_URL": mock_url for name in ("ADMISSION", "SERVING", "TELEMETRY")},
        "WATTSHIFT_DATA_DIR": str(folder),
        "REDIS_URL": "redis://127.0.0.1:1/0",
        "ROUTER_PORT": str(port),
        "ROUTER_WORKERS": str(workers),
    }


@contextmanager
def process(
    arguments: list[str],
    environment: dict[str, str],
    *,
    core: str,
    python: str = sys.executable,
    log: str = os.devnull,
    folder: Path | None = None,
) -> Iterator[int]:
    """Run a Python process on a core, in a folder, and yield its id."""
    command = ["taskset", "-c", core, python, *arguments]
    with (
        open(log, "wb") as output,
        subprocess.Popen(command, env=os.environ | environment, stdout=output, stderr=output, cwd=folder) as running,
    ):
        try:
            yield running.pid
        finally:
            running.terminate()
            try:
                running.wait(20)
            except subprocess.TimeoutExpired:
                running.kill()


def answers(port: int) -> bool:
    """Return whether the mock listens."""
    return http_ready(("127.0.0.1", port))


def everything(port: int, pid: int | None = None, *, is_whole: bool = True) -> dict[str, Any]:
    """Return requests a second at 32 connections, latencies at 100 requests a second, and first bytes of streams."""
    before = cpu_s(pid)
    closed = one(port, connections=32)
    used = cpu_s(pid) - before
    found: dict[str, Any] = {"closed_32": asdict(closed)}
    if pid is not None:
        found["cpu_us_per_request"] = 1e6 * used / max(1, closed.requests)
        found["per_cpu_s"] = closed.requests / used
        found["share_of_a_core"] = used / DURATION_S
    if is_whole:
        found["at_100_per_s"] = asdict(one(port, connections=16, per_second=100))
        found["first_byte"] = asyncio.run(first_bytes(port))
    return found


def one(
    port: int, *, connections: int, per_second: float = 0, is_long: bool = False, duration_s: float = DURATION_S
) -> Result:
    """Return the result of one load, of long prompts if so."""
    body = json.dumps(LONG_BODY if is_long else BODY)
    load = Load("127.0.0.1", port, PATH, KEY, body, connections, duration_s, 0 if not per_second else 2)
    load.per_second, load.status, load.text_characters = per_second, 200, LONG_CHARACTERS
    return measure(load)


def cpu_s(pid: int | None) -> float:
    """Return the processor time of a process and its children, seconds."""
    if pid is None:
        return 0.0
    total = 0.0
    for found in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = found.read_text().rpartition(") ")[2].split()
        except OSError:
            continue
        if int(found.parent.name) == pid or int(fields[1]) == pid:
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


async def stream(port: int) -> tuple[float, float, bytes]:
    """Ask for a stream; return seconds to the first byte of its body, to its end, and the body."""
    body = json.dumps({**BODY, "stream": True}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began_s = time.perf_counter()
    writer.write(f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    await reader.readuntil(b"\r\n\r\n")
    content = await reader.read(1)
    first_s = time.perf_counter() - began_s
    while b"[DONE]" not in content[-200:]:
        piece = await reader.read(65_536)
        if not piece:
            break
        content += piece
    writer.close()
    return first_s, time.perf_counter() - began_s, content


async def first_bytes(port: int) -> dict[str, float]:
    """Return the times to the first byte of streams, fifty a second."""
    found: list[float] = []
    for _ in range(int(50 * DURATION_S)):
        due_s = time.perf_counter() + 0.02
        found.append((await stream(port))[0])
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
    found.sort()
    return {"p50_ms": 1e3 * found[len(found) // 2], "p99_ms": 1e3 * found[int(0.99 * len(found))]}


async def open_streams(port: int) -> dict[str, float]:
    """Open many streams at once, all of which last for seconds; return how many came to their end."""
    turns = asyncio.Semaphore(200)
    opened: list[tuple[float, float, bytes] | BaseException] = []

    async def ask() -> None:
        async with turns:
            await asyncio.sleep(0)
        try:
            opened.append(await stream(port))
        except (OSError, asyncio.IncompleteReadError) as error:
            opened.append(error)

    await asyncio.gather(*(ask() for _ in range(STREAMS)))
    complete = [each for each in opened if isinstance(each, tuple) and b"[DONE]" in each[2]]
    return {"opened": len(opened), "complete": len(complete), "longest_s": max(each[1] for each in complete)}


def install(name: str) -> str | None:
    """Install another router where it is not yet; return why it cannot be."""
    venv, package = PEERS_DIR / name, PEERS[name][0]
    done = venv / "installed"
    if done.exists():
        return None
    try:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True, capture_output=True)
        pip = [str(venv / "bin/pip"), "install", "-q", package]
        subprocess.run(pip, check=True, capture_output=True, timeout=MOST_INSTALL_S)
    except subprocess.CalledProcessError as error:
        return f"not installed: {last_line(error.stderr)}"
    except (subprocess.TimeoutExpired, OSError) as error:
        return f"not installed: {error}"
    done.touch()
    return None


def last_line(output: bytes) -> str:
    """Return the last line that says something."""
    return next((line for line in reversed(output.decode(errors="replace").splitlines()) if line.strip()), "no output")


def peer(folder: Path, name: str, mock_port: int, port: int) -> dict[str, Any]:
    """Return the figures of another router, or why there are none."""
    venv, arguments = PEERS_DIR / name, PEERS[name][1]
    shown = subprocess.run([str(venv / "bin/pip"), "show", name], check=False, capture_output=True, text=True)
    version = shown.stdout.split("\n")[1:2]
    mock_url = f"http://127.0.0.1:{mock_port}"
    if name == "litellm":
        config = folder / "litellm.json"
        model = {"model": f"openai/{MODEL}", "api_base": f"{mock_url}/v1", "api_key": "none"}
        own_risk = {"dangerously_permit_weak_or_unset_master_key": True}  # without it, 1.106 does not start
        models = [{"model_name": MODEL, "litellm_params": model}]
        config.write_text(json.dumps({"model_list": models, "general_settings": own_risk}))
        options = ["--config", str(config), "--port", str(port), "--num_workers", "1"]
        environment = {"LITELLM_MODE": "PRODUCTION", "LITELLM_LOG": "ERROR"}
    else:
        options = ["--worker-urls", mock_url, "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
        environment = {}
    log = folder / f"{name}.log"
    python = str(venv / "bin/python")
    with process([*arguments, *options], environment, core="1", python=python, log=str(log)) as pid:
        try:
            wait_until(lambda: completes(port) or has_ended(pid), within_s=MOST_START_S)
        except TimeoutError:
            why = f"it did not answer within {MOST_START_S} s: {last_line(log.read_bytes())}"
            return {"left_out": why, "version": version}
        if has_ended(pid):
            return {"left_out": f"it ended: {last_line(log.read_bytes())}", "version": version}
        return {"version": version, **everything(port, pid, is_whole=False)}


def has_ended(pid: int) -> bool:
    """Return whether a process that was started here has ended."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")


def completes(port: int) -> bool:
    """Return whether a completion is answered."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    try:
        connection.request("POST", PATH, json.dumps(BODY), headers)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    sys.exit(main())
