"""The program of a job that profiles a pool's server: it starts it, and sends it ever more requests at once.

It follows ``own_server`` in the job's program, and keeps to the standard library of Python 3.8, too. Its only argument
is a JSON object; each line of its standard output is one: when the server was ready, when it was left without requests,
and what was measured of each class at each number of requests at once.
"""

import http.client
import json
import random
import signal
import sys
import threading
import time
from typing import Any

from services.cli.serving.own_server import GaveUp, running

WORDS = ("the", "wind", "turns", "north", "and", "lights", "stay", "on", "over", "a", "quiet", "town")
LONGEST = 10
"""A level takes at most this many times as long as it should, if few requests end."""
SATURATED = 1.03
"""The next level has to answer this many times as many requests, or there is no need for another one."""


class Level:
    """Clients that send requests of one length, each one after another, until enough have been answered."""

    def __init__(self, port: int, plan: dict[str, Any], of_class: dict[str, Any], at_once: int) -> None:
        self._port, self._plan, self._class, self._at_once = port, plan, of_class, at_once
        self._lock = threading.Lock()
        self._answers: list[tuple[float, float, float, int, int]] = []
        self._failure: str | None = None
        self._is_over = False

    def measure(self) -> dict[str, Any]:
        """Return what was measured after the warm-up; ``GaveUp`` if a request failed, or none ended in time."""
        clients = [threading.Thread(target=self._send, daemon=True) for _ in range(self._at_once)]
        for each in clients:
            each.start()
        time.sleep(self._plan["warmup_s"])
        start_s, began = time.time(), time.perf_counter()
        while True:
            time.sleep(0.05)
            took_s = time.perf_counter() - began
            with self._lock:
                ended = [each for each in self._answers if each[0] >= began]
                failure = self._failure
            is_enough = took_s >= self._plan["seconds"] and len(ended) >= max(self._at_once, 3)
            if failure or is_enough or took_s >= LONGEST * self._plan["seconds"]:
                break
        self._is_over = True
        for each in clients:
            each.join()
        if failure or not ended:
            raise GaveUp(failure or f"no request of class {self._class['name']} ended in {took_s:.0f} s")
        per_token_s = [(all_s - first_s) / max(tokens - 1, 1) for _, all_s, first_s, _, tokens in ended]
        return {
            "partition": self._class["partition"],
            "class": self._class["name"],
            "at_once": self._at_once,
            "start_s": start_s,
            "end_s": start_s + took_s,
            "requests": len(ended),
            "qps": len(ended) / took_s,
            "latency_s": _mean([each[1] for each in ended]),
            "ttft_ms": 1e3 * _p95([each[2] for each in ended]),
            "tbt_ms": 1e3 * _p95(per_token_s),
            "input_tokens": _mean([each[3] for each in ended]),
            "output_tokens": _mean([each[4] for each in ended]),
        }

    def _send(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=self._plan["timeout_s"])
        try:
            while not self._is_over and self._failure is None:
                answer = self._ask(connection)
                with self._lock:
                    self._answers.append(answer)
        except (OSError, ValueError, http.client.HTTPException, GaveUp) as error:
            if not self._is_over:
                self._failure = f"a request failed: {error or type(error).__name__}"
        finally:
            connection.close()

    def _ask(self, connection: http.client.HTTPConnection) -> tuple[float, float, float, int, int]:
        """Return when an answer ended, how long it and its first token took, seconds, and the tokens of both sides."""
        words = " ".join(random.choices(WORDS, k=self._class["input_tokens"]))
        body = {
            "model": self._plan["model"],
            "prompt": f"{random.random()} {words}",  # nothing is cached of it
            "max_tokens": self._class["output_tokens"],
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise GaveUp(f"the server answers {answer.status}: {answer.read(300).decode(errors='replace')}")
        first, usage = None, {}
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("error"):
                raise GaveUp(str(event["error"])[:300])
            usage = event.get("usage") or usage
            if first is None and any(choice.get("text") for choice in event.get("choices", ())):
                first = time.perf_counter()
        ended = time.perf_counter()
        if first is None or not usage.get("completion_tokens"):
            raise GaveUp("an answer has no tokens, or does not say how many")
        return ended, ended - began, first - began, usage["prompt_tokens"], usage["completion_tokens"]


def _mean(values: list[Any]) -> float:
    return sum(values) / len(values)


def _p95(values: list[float]) -> float:
    return sorted(values)[min(int(0.95 * len(values)), len(values) - 1)]


def keeps(measured: dict[str, Any], limits: dict[str, Any]) -> bool:
    """Whether a measurement keeps the limits of its class that are stated."""
    pairs = (("latency_s", "max_latency_s"), ("ttft_ms", "max_ttft_ms"), ("tbt_ms", "max_tbt_ms"))
    return all(limits.get(most) is None or measured[name] <= limits[most] for name, most in pairs)


def sweep(plan: dict[str, Any]) -> None:
    """Start the server, measure it, end it, and print what was found as soon as it is."""
    began = time.perf_counter()
    with running(plan) as port:
        _tell({"ready_s": time.perf_counter() - began})
        at_s = time.time()
        time.sleep(plan["seconds"])
        _tell({"idle": True, "start_s": at_s, "end_s": time.time()})
        for each in plan["classes"]:
            most_qps = 0.0
            for at_once in plan["levels"]:
                measured = Level(port, plan, each, at_once).measure()
                _tell(measured)
                if not keeps(measured, each) or measured["qps"] < SATURATED * most_qps:
                    break
                most_qps = measured["qps"]


def _tell(found: dict[str, Any]) -> None:
    print(json.dumps(found), flush=True)


def main() -> int:
    """Measure as the argument says."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the server ends, too
    try:
        sweep(json.loads(sys.argv[1]))
    except (GaveUp, OSError) as error:
        _tell({"error": str(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
