"""Run a command of a Ray job when Wattshift says so, in a placement group of the size it says.

    ray job submit -- python -m wattshift.ray --gpus 1-4 --stoppable -- python train.py

The command waits in its Ray job until the bridge (``docs/ray.md``) releases it. A run ends with the command, or when
the bridge wants it to stop: SIGTERM, a grace period, SIGKILL. The command then waits again, in the same Ray job, and
the next run has the size planned by then. Without a bridge it does not wait for ever: the last answer says how long.

Inside the command, ``placement_group`` and ``scaling_config`` return what the run was given. This module needs only
Ray and the standard library.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

BRIDGE = "http://127.0.0.1:8267"
BRIDGE_VARIABLE, GROUP, NODES = "WATTSHIFT_RAY_BRIDGE", "WATTSHIFT_PLACEMENT_GROUP", "WATTSHIFT_NODES"
UNHEARD_S = 120.0
"""For how long a job waits that has never had an answer."""
ASK_TIMEOUT_S = 10.0
OVERDUE = 124
"""Exit status of a command that reached its time limit."""
OVERDUE_GRACE_S = 30.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def placement_group() -> Any:
    """Return the placement group of this run; None outside a run."""
    if not (name := os.environ.get(GROUP)):
        return None
    from ray._raylet import PlacementGroupID
    from ray.util.placement_group import PlacementGroup

    return PlacementGroup(PlacementGroupID(bytes.fromhex(name)))


def scaling_config(**options: Any) -> Any:
    """Return the ``ray.train.ScalingConfig`` of this run: a worker for each GPU, on the nodes that it was given.

    Ray Train makes a placement group itself, so this run's own is removed to make room for it. ``options`` are passed
    on to ScalingConfig. Outside a run there is one worker.
    """
    from ray.train import ScalingConfig
    from ray.util.placement_group import remove_placement_group

    nodes = json.loads(os.environ.get(NODES, "[]"))
    if not nodes:
        return ScalingConfig(num_workers=1, **options)
    remove_placement_group(placement_group())
    labels = [{"ray.io/node-id": node} for node in nodes]
    return ScalingConfig(**{"num_workers": len(nodes), "use_gpu": True, "label_selector": labels, **options})


class Entry:
    """A command that waits and runs, as often as it is told to.

    Attributes:
        state: ``waits``, ``starts`` (its placement group is not there yet), ``runs``, ``stops`` to wait again, or
            ``overdue``: it stops for good.
        run: How often it has started.
    """

    def __init__(self, given: argparse.Namespace, name: str) -> None:
        self._given = given
        self._name = name
        self.state, self.run = "waits", 0
        self._answer: dict[str, Any] = {"action": "hold"}
        self._heard_s = time.monotonic()
        self._stop_at_s = self._began_s = self._used_s = 0.0
        self._began_at: str | None = None
        self._note = ""
        self._group: Any = None
        self._nodes: list[str] = []
        self._child: subprocess.Popen[bytes] | None = None

    def look(self) -> int | None:
        """Ask the bridge and do what it says; return the exit status once it is over."""
        if (status := self._ended()) is not None:
            return status
        answer = self._ask()
        action = answer["action"]
        if self.state == "waits" and action == "run":
            self._reserve(int(answer.get("gpus") or self._given.gpus[0]), answer.get("zone"))
        elif self.state == "starts" and action != "run":
            self._let_go()
        elif self.state == "runs" and action == "stop":
            self._stop(float(answer.get("grace_s", 0)))
        if self.state == "starts" and self._group.wait(timeout_seconds=0.5):
            self._start()
        if self.state in ("stops", "overdue") and time.monotonic() >= self._stop_at_s:
            self._signal(signal.SIGKILL)
        return None

    def pause(self) -> None:
        """Wait until the next look; only briefly if something is about to happen."""
        wait_s = float(self._answer.get("again_s", 2.0)) if self.state in ("waits", "runs") else 0.2
        until_s = time.monotonic() + wait_s
        while time.monotonic() < until_s and (self._child is None or self._child.poll() is None):
            time.sleep(0.1)

    def end(self) -> None:
        """End the command, because Ray stops this job."""
        if self._child is not None:
            self._signal(signal.SIGTERM)
            self._child.wait()

    def _ask(self) -> dict[str, Any]:
        """Return the bridge's answer; without one, the last answer, or an order to run once that is too old."""
        given = self._given
        low, high, step = given.gpus
        document = {
            **{
                "state": "stops" if self.state == "overdue" else self.state,
                "run": self.run,
                "began_at": self._began_at,
            },
            **{"nodes": Counter(self._nodes), "gpus": low, "max_gpus": high, "step_gpus": step},
            **{"steer": given.steer == "on", "stoppable": given.stoppable, "deadline": given.deadline},
            **{"flexible_s": given.flexible, "time_limit_s": given.time_limit, "gpu_model": given.gpu_model},
        }
        url = f"{given.bridge}/v1/entries/{quote(self._name, safe='')}"
        request = urllib.request.Request(url, json.dumps(document).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=ASK_TIMEOUT_S) as reply:
                answer = json.load(reply)
            if answer["action"] not in ("hold", "run", "stop"):
                raise ValueError(f"unknown action {answer['action']!r}")
            self._answer = answer
            self._heard_s = time.monotonic()
        except (OSError, ValueError, KeyError, TypeError) as error:
            silent_s = time.monotonic() - self._heard_s
            if silent_s >= float(self._answer.get("for_s", UNHEARD_S)):
                self._say(f"the bridge is silent ({error}); it starts without it")
                return {"action": "run"}
            self._say(f"the bridge is silent ({error})")
        else:
            self._say(self._answer.get("note") or self._answer["action"])
        return self._answer

    def _say(self, note: str) -> None:
        if note != self._note:
            print(f"wattshift: {note}", flush=True)
        self._note = note

    def _reserve(self, gpus: int, zone: str | None) -> None:
        import ray
        from ray.util.placement_group import placement_group as make

        if not ray.is_initialized():
            ray.init(log_to_driver=False, configure_logging=False)
        bundle = {"GPU": 1.0, "CPU": self._given.cpus} | ({f"zone:{zone}": 0.001} if zone else {})
        wanted = {name: amount for name, amount in bundle.items() if amount}
        self._group = make([wanted] * gpus, strategy="PACK", name=f"wattshift:{self._name}:{self.run + 1}")
        self.state = "starts"

    def _let_go(self) -> None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self._group)
        self._group, self._nodes, self._began_at, self.state = None, [], None, "waits"

    def _start(self) -> None:
        from ray.util.placement_group import placement_group_table

        placed = placement_group_table(self._group)["bundles_to_node_id"]
        self._nodes = [placed[bundle] for bundle in sorted(placed)]
        self.run += 1
        own = {
            GROUP: self._group.id.hex(),
            NODES: json.dumps(self._nodes),
            "WATTSHIFT_GPUS": str(len(self._nodes)),
            "WATTSHIFT_RUN": str(self.run),
        }
        self._child = subprocess.Popen(
            self._given.command, env=os.environ | own, start_new_session=True, preexec_fn=_die_with_parent
        )
        self._began_s, self._began_at = time.monotonic(), datetime.now(UTC).isoformat()
        self.state = "runs"

    def _stop(self, grace_s: float, state: str = "stops") -> None:
        self._stop_at_s, self.state = time.monotonic() + grace_s, state
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        if self._child is not None and self._child.poll() is None:
            os.killpg(self._child.pid, number)

    def _ended(self) -> int | None:
        """Return the command's exit status if it has ended by itself, or by its time limit."""
        if self._child is None:
            return None
        used_s = self._used_s + time.monotonic() - self._began_s
        if (status := self._child.poll()) is None:
            if self._given.time_limit and used_s >= self._given.time_limit and self.state == "runs":
                self._say(f"it reached its time limit of {self._given.time_limit:g} s")
                self._stop(OVERDUE_GRACE_S, "overdue")
            return None
        self._kill_the_rest()
        if self.state == "overdue":
            return OVERDUE
        if self.state == "runs":
            return status if status >= 0 else 128 - status
        self._child, self._used_s = None, used_s
        self._let_go()
        return None

    def _kill_the_rest(self) -> None:
        """Kill what the command left running, so that the next run does not meet it."""
        assert self._child is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)


def _die_with_parent() -> None:
    """Have the kernel kill the command if this process is killed: its Ray job is over then."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def sizes(text: str) -> tuple[int, int, int]:
    """Return the least and most GPUs, and the step between sizes.

    >>> sizes("2"), sizes("1-4"), sizes("2-8/2")
    ((2, 2, 1), (1, 4, 1), (2, 8, 2))

    Raises:
        ArgumentTypeError: It is neither ``N``, ``LOW-HIGH`` nor ``LOW-HIGH/STEP`` of positive numbers.
    """
    span, _, step = text.partition("/")
    low, _, high = span.partition("-")
    try:
        found = int(low), int(high or low), int(step or 1)
    except ValueError:
        found = (0, 0, 0)
    if not 1 <= found[0] <= found[1] or found[2] < 1 or (found[1] - found[0]) % found[2]:
        raise argparse.ArgumentTypeError(f"GPUs are N, LOW-HIGH or LOW-HIGH/STEP, not {text!r}")
    return found


def submission() -> str:
    """Return the submission id of the Ray job that this process belongs to; empty if there is none."""
    try:
        config = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
        return str(config["metadata"]["job_submission_id"])
    except (ValueError, KeyError, TypeError):
        return ""


def read(arguments: list[str]) -> argparse.Namespace:
    """Return the arguments of the command line; exit with a message if they are wrong."""
    parser = argparse.ArgumentParser("python -m wattshift.ray", description="Run a command when Wattshift says so.")
    parser.add_argument("--gpus", type=sizes, default=(1, 1, 1), help="N, LOW-HIGH or LOW-HIGH/STEP; by default 1")
    parser.add_argument("--cpus", type=float, default=1.0, help="CPUs beside each GPU; by default 1")
    parser.add_argument("--gpu-model", help="plan for this model")
    parser.add_argument("--stoppable", action="store_true", help="it may be stopped, and goes on from its checkpoint")
    parser.add_argument("--deadline", help="by when it is to be done: 2026-11-24T18:00:00Z")
    parser.add_argument(
        "--flexible", type=float, metavar="SECONDS", help="how much later than at once; a time limit too"
    )
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="of all its runs together")
    parser.add_argument("--steer", choices=("on", "off"), default="on", help="off: start at once, only account for it")
    parser.add_argument("--bridge", default=os.environ.get(BRIDGE_VARIABLE, BRIDGE), help=f"by default {BRIDGE}")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command")
    given = parser.parse_args(arguments)
    given.command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not given.command:
        parser.error("there is no command")
    if given.flexible is not None and not given.time_limit:
        parser.error("--flexible counts from a --time-limit")
    return given


def main() -> int:
    """Run the command as often as it is told to; return its exit status."""
    given = read(sys.argv[1:])
    if not (name := submission()):
        print("wattshift: this is not in a Ray job: submit it by `ray job submit`", file=sys.stderr)
        return 2
    entry = Entry(given, name)

    def leave(number: int, _: object) -> None:
        entry.end()
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    while (status := entry.look()) is None:
        entry.pause()
    return status


if __name__ == "__main__":
    sys.exit(main())
