"""Whatever the system repeats by itself has a bound, a back-off and a reason; here is the list of it.

Found by a rule over the source of its processes: functions with a loop that sleeps or waits, tasks of Celery, and
settings and constants whose names speak of repetitions. The command line and the client for users are left out: what
they wait for ends with the user's command.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from tests.architecture.rules import tree_of
from tests.support.servers import ROOT

ROOMS = ("services", "gateway", "gpu_agent", "carbon_service", "optimizer_service")
ASIDE = ("services/cli/",)


class Pace(NamedTuple):
    """A control loop: each turn is new work, and a turn that fails is the next one's. ``every``: how long it rests."""

    every: str


class Until(NamedTuple):
    """A wait that ends by itself: at a moment, or with the process, gang or caller that it is for."""

    end: str


class Retry(NamedTuple):
    """The same work once more: how often at most, how the pauses grow or why they need not, and who says why."""

    bound: str
    back_off: str
    reason: str


LOOPS: dict[str, Pace | Until | Retry] = {
    # --- admission
    "services/admission/changes.py::Changes.follow": Until("the client leaves: `_followers`"),
    "services/admission/changes.py::Changes._read_on": Pace("`_poll_s`"),
    "services/admission/service.py::Committer.run": Pace("`_arrived`"),
    "services/admission/service.py::Committer._settle": Retry(
        "`_patience_s`", "`RETRY_EVERY_S`, in one process", "503"
    ),
    "services/admission/streaming.py::EventFeed.follow": Until("the client leaves"),
    "services/admission/streaming.py::EventFeed._tail": Pace("`_poll_s`"),
    "services/admission/first_start.py::ensure_first_admin_patiently": Retry(
        "`patience_s`", "`RETRY_EVERY_S`, once per start", "the log, and the supervisor's"
    ),
    "services/kit/redis.py::JobHints.run": Pace("`_wanted`"),
    "services/admission/logs.py::Logs._pieces": Until("the gang is over or the client leaves: `_is_over`"),
    # --- engines
    "services/engines/kueue/app.py::release": Pace("`_LOOK_S`"),
    "services/engines/kueue/bridge.py::Bridge._watch": Pace("`_AGAIN_S`"),
    # --- kit
    "services/kit/app.py::end_with_parent.watch": Until("the parent has ended"),
    "services/kit/background/worker.py::Worker.ask": Retry("`DATABASE_PATIENCE_S`", "one process at a time", "the log"),
    "services/kit/background/worker.py::Worker._renew": Until("the work is over: its `_lease_s` is renewed"),
    "services/kit/bridges/talk.py::Talk.keep_looking": Pace("`interval_s`"),
    "services/kit/command_stream.py::CommandStream.run": Pace("`_retry_s`"),
    "services/kit/heads.py::Server.main_loop": Pace("`_TURN_S`"),
    "services/kit/http.py::ServiceClient.request": Retry("`attempts`", "`0.05 * 4**attempt`, with jitter", "503"),
    "services/kit/repeating.py::repeat": Pace("`every_s`"),
    "services/kit/sockets.py::listening": Until("the other program lets the port go: `port.in_use` says so"),
    "services/kit/tasks.py::end_tasks": Until("the tasks have ended"),
    "services/kit/tasks.py::to_the_end": Until("the work has ended"),
    "services/kit/tasks.py::merged": Until("the caller is cancelled or the tasks end"),
    # --- router
    "services/router/lanes.py::Lane.take_spare": Until("`until_s`, looking every `SPARE_LOOK_S`"),
    "services/router/app.py::supervise": Until("SIGTERM; a worker that died is begun anew after `time.sleep`"),
    "services/router/upstream.py::Connection.head": Until("the request's time: `_wait`"),
    "services/router/upstream.py::Connection.whole": Until("the request's time: `_wait`"),
    "services/router/upstream.py::Connection.piece": Until("the request's time: `_wait`"),
    # --- scheduler
    "services/scheduler/grid/openadr.py::OpenAdr.run": Pace("`openadr_poll_s`"),
    "services/scheduler/loop.py::Scheduler.run": Pace("`tick_s`"),
    "services/scheduler/power/ipmi.py::set_power.is_so": Until("`until`"),
    "services/scheduler/power/nodes.py::NodePower.run": Pace("`LOOK_EVERY_S`"),
    "services/scheduler/power/nodes.py::NodePower._carry_out": Until("the database is back: `node_power.waiting`"),
    "services/scheduler/loop.py::Relay.run": Pace("`_look_every_s`"),
    # --- serving
    "services/kit/presence.py::Presence.wait": Pace("`_ask_at_s`"),
    "services/serving/solver.py::PlanSolver.solve": Until("`within_s`"),
    "services/serving/solver.py::PlanSolver._ask": Until("`within_s` of `_solve`"),
    "services/serving/worker.py::main": Until("`IDLE_S` without a plan"),
    # --- standalone
    "services/standalone/data_folder.py::_locked": Retry(
        "`_LOCK_TRIES`", "`_LOCK_PAUSE_S`, a moment", "already running"
    ),
    "services/standalone/dozing.py::Dozing._act": Until("each worker has been looked at"),
    "services/standalone/dozing.py::Dozing.follow": Pace("`LOOK_EVERY_S`"),
    "services/standalone/node_power.py::follow": Pace("`LOOK_EVERY_S`"),
    "services/standalone/node_power.py::power": Until("`WITHIN_S`"),
    "services/standalone/probes.py::PulseProbe.answer": Until("`_answers` of the supervisor"),
    "services/standalone/reserve.py::keep": Pace("`asyncio.sleep`"),
    "services/standalone/root_secret.py::follow": Pace("`LOOK_EVERY_S`"),
    "services/standalone/root_secret.py::_until_in_force": Until("`WITHIN_S`"),
    "services/standalone/stack.py::Stack._beat": Pace("`asyncio.sleep`"),
    "services/standalone/stack.py::serve": Until("a signal to end"),
    "services/standalone/stack.py::up": Until("the installation is up, or its process ended"),
    "services/standalone/stack.py::down": Until("the processes have ended, or a time"),
    "services/standalone/supervisor.py::Supervisor.start": Until("`_start_within_s`"),
    "services/standalone/supervisor.py::Supervisor.replace": Until("`_start_within_s`"),
    "services/standalone/supervisor.py::Supervisor._rotate_logs": Pace("`ROTATE_EVERY_S`"),
    "services/standalone/supervisor.py::_Child._keep_running": Retry(
        "`EARLY_ENDS` before it was ever ready; later none: a service is needed as long as `up` is",
        "`FIRST_PAUSE_S` doubles to `LONGEST_PAUSE_S`",
        "`_detail` in `status`",
    ),
    "services/standalone/supervisor.py::_Child._await_ready": Until("the process ends"),
    "services/standalone/supervisor.py::_Child._why_hung": Until("the process ends or hangs"),
    # --- telemetry and gateway
    "services/telemetry/batches.py::Batches._run": Until("nobody waits"),
    "gateway/forward.py::Forwarder._ask": Retry("`ATTEMPTS`", "`0.1 * 2**attempt`", "503"),
    "gateway/gather.py::Gatherer._send": Retry("`ATTEMPTS`", "`RETRY_EVERY_S`, one group", "503"),
    # --- agents
    "gpu_agent/agent.py::Agent._watch_listeners": Pace("`asyncio.sleep`"),
    "gpu_agent/agent.py::Agent._watch_ranks": Pace("`_tick_due`"),
    "gpu_agent/agent.py::Agent._keep_house": Pace("`HOUSEKEEPING_S`"),
    "gpu_agent/checkpoints.py::Checkpoints.prepare": Retry(
        "the gang's: it is given up after `start_timeout_s`", "`pauses`", "`checkpoint.not_fetched`; `start_failed`"
    ),
    "gpu_agent/checkpoints.py::Checkpoints.copy_running": Pace("`asyncio.sleep`"),
    "gpu_agent/checkpoints.py::Checkpoints._copy_last": Retry(
        "none: a checkpoint that nobody else has is not given up", "`pauses`", "`checkpoint.not_copied`"
    ),
    "gpu_agent/devices/simulated.py::CutFaults.check": Until("the file of a test is gone"),
    "gpu_agent/exec_sessions.py::ExecSession.run": Until("the session's longest time"),
    "gpu_agent/kept_files.py::KeptFiles._events": Until("the archive's end, or the longest time of a session"),
    "gpu_agent/exec_sessions.py::ExecSession._read": Until("the session has ended: `_exited`"),
    "gpu_agent/gangs.py::Gangs.stop_all": Until("`deadline`"),
    "gpu_agent/gangs.py::Gangs._may_go_on": Until("`_reason_to_give_up`"),
    "gpu_agent/inputs.py::Fetcher._asked": Retry(
        "the gang's: it is given up after `start_timeout_s`", "`pauses`", "`input.not_fetched`; `start_failed`"
    ),
    "gpu_agent/latency_clocks.py::LatencyInbox.run": Pace("`_retry_s`"),
    "gpu_agent/processes.py::kill_marked": Until("they are gone, or a time"),
    "gpu_agent/reporting.py::ReportingAgent._keep_going": Pace("`retry_s`"),
    "gpu_agent/reporting.py::ReportingAgent._send_heartbeats": Pace("`_heartbeat_due`"),
    "gpu_agent/reporting.py::ReportingAgent._watch_health": Pace("`asyncio.sleep`"),
    "gpu_agent/reporting.py::ReportingAgent._measure": Pace("`asyncio.sleep`"),
    "gpu_agent/reporting.py::ReportingAgent._deliver": Pace("`HOUSEKEEPING_S`, `retry_s`"),
    "gpu_agent/reporting.py::_take_state_folder": Retry("`_LOCK_PATIENCE_S`", "one process", "`StateFolderTakenError`"),
    "gpu_agent/scratch.py::Scratch.watch": Pace("`_LOOK_S`, and longer where a look takes long"),
    "gpu_agent/shim.py::_Shim.run": Until("the rank and all of its processes have ended"),
    "gpu_agent/shim.py::_Shim._write_exit": Retry(
        "none: without it the job would run again",
        "`_FULL_DISK_PAUSE_S`, one small file",
        "the node is closed by its disk",
    ),
    "gpu_agent/shim.py::_run_for": Until("its time"),
    # --- carbon
    "carbon_service/app.py::_started": Retry("`deadline_s`", "one process", "`database.waiting`"),
    "carbon_service/poller.py::Poller.run": Pace("`poll_interval_s`; after failures up to `LONGEST_BACKOFF_S`"),
    "carbon_service/providers/http.py::RateLimit.wait": Until("the limit has room"),
    "carbon_service/providers/http.py::ProviderClient.get": Retry("`attempts`", "`_pause`", "`ProviderError`"),
}
"""Functions with loops that sleep or wait."""

LIMITS: dict[str, Retry | str] = {
    "start_attempts": Retry(
        "`start_attempts` gangs", "`restart_pause_s` doubles to `LONGEST_PAUSE_S`", "`start_failed`"
    ),
    "restart_pause_s": "the first pause of jobs that start again, after failures (`max_restarts`), starts and losses",
    "MAX_RESTARTS": Retry(
        "`max_restarts`", "`restart_pause_s` doubles to `LONGEST_PAUSE_S`", "`backing_off`, `failed`"
    ),
    "max_node_losses": Retry(
        "`max_node_losses`, none a day after another", "`restart_pause_s` doubles", "`node_losses`"
    ),
    "LOSSES_FORGOTTEN_S": "a bound on the rate of losses: one a day",
    "RESTART_AFTER_NODE_LOSS": "whether a lost node ends the job",
    "max_attempts": Retry("`max_attempts` claims of a solve or simulation", "`lease_s` apart", "`given_up`"),
    "node_power_attempts": Retry("`node_power_attempts`", "`node_power_backoff_s` to `LONGEST_BACKOFF_S`", "`failed`"),
    "node_power_backoff_s": "the first pause of that",
    "webhook_retry_s": Retry("`disable_after_s`", "`delay_after_s` to `LONGEST_PAUSE_S`", "the webhook's last error"),
    "LONGEST_RETRY_AFTER_S": "the most of what a webhook's server asks for",
    "plan_retry_s": Retry("`deadline_at` of the plan's period", "`plan_retry_s`, a solve each", "the plan's detail"),
    "fleet_retry_s": Retry("the next trigger", "`fleet_retry_s` doubles to `LONGEST_RETRY_S`", "`fleet.plan_failed`"),
    "LONGEST_RETRY_S": "the longest pause of that",
    "partition_retry_s": Retry(
        "until the GPU is free; what is refused otherwise is not tried again", "`_retry_s`", "`BUSY`"
    ),
    "retry_s": "an agent's pause before it asks its control plane again: see the loops of gpu_agent",
    "FIRST_PAUSE_S": "first pause of the supervisor's restarts, of polls of a solve, and of a server's circuit breaker",
    "LONGEST_PAUSE_S": "longest pause of these, of webhooks and of jobs that start again",
    "LONGEST_BACKOFF_S": "longest pause of polls of providers and of powering nodes",
    "RETRY_EVERY_S": "the pause of waits for a database, which have a deadline, and of groups of submissions",
    "ATTEMPTS": "rounds, forwards and steering within one turn or request, each with what has changed meanwhile",
    "ATTEMPT_S": "how long a sign-in may take",
    "attempts": Retry("`attempts` of a routed request", "another server; `breaker` of each", "the answer's problem"),
    "the controller's instances": Retry(
        "as long as the pool is to have them", "`FIRST_S` doubles to `LONGEST_S`", "`Failures` of a place and mode"
    ),
}
"""Settings and constants whose names speak of repetitions, and what they bound; the last ones have other names."""

TASKS = {
    "services/simulator/tasks.py::simulate": "max_attempts",
    "optimizer_service/tasks.py::solve": "max_attempts",
    "optimizer_service/tasks.py::train_lengths": "the next day's",
}
"""Celery's: none is repeated by Celery itself, but by who finds its row unfinished."""

_SLEEPS = re.compile(r"(^|[._])(sleep|pause|wait|wait_for)$")
_SPEAKS = re.compile(r"retry|attempts?(_|$)|back_?off|restart|LONGEST_PAUSE|FIRST_PAUSE|losses", re.IGNORECASE)


@cache
def sources() -> dict[str, str]:
    files = (file for room in ROOMS for file in sorted((ROOT / room).rglob("*.py")))
    named = {str(file.relative_to(ROOT)): file for file in files}
    return {name: file.read_text() for name, file in named.items() if not name.startswith(ASIDE)}


def trees() -> dict[str, ast.Module]:
    return {name: tree_of(text) for name, text in sources().items()}


def functions(node: ast.AST, name: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for each in ast.iter_child_nodes(node):
        inner = name
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{name}.{each.name}".lstrip(".")
            if not isinstance(each, ast.ClassDef):
                yield inner, each
        yield from functions(each, inner)


def own(node: ast.AST) -> Iterator[ast.AST]:
    """What a function does itself, without the functions in it."""
    for each in ast.iter_child_nodes(node):
        if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield each
            yield from own(each)


def rests(function: ast.AST) -> bool:
    return any(
        isinstance(call, ast.Call) and _SLEEPS.search(ast.unparse(call.func))
        for loop in own(function)
        if isinstance(loop, ast.While | ast.For | ast.AsyncFor)
        for call in own(loop)
    )


def speaking_names(tree: ast.Module) -> Iterator[str]:
    """Constants of a module, and fields of settings, whose names speak of repetitions."""
    classes = [each for each in tree.body if isinstance(each, ast.ClassDef) and "Settings" in each.name]
    bodies = [tree.body, *(each.body for each in classes)]
    for statement in (each for body in bodies for each in body):
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name) and not target.id.startswith("_") and _SPEAKS.search(target.id):
                yield target.id


def test_every_loop_that_rests_is_listed() -> None:
    may_rest = {
        name: tree for name, tree in trees().items() if re.search(r"(sleep|pause|wait|wait_for)\(", sources()[name])
    }
    found = {f"{name}::{path}" for name, tree in may_rest.items() for path, each in functions(tree) if rests(each)}
    assert found == LOOPS.keys(), "say of each what bounds it, how its pauses grow, and who is told why"


def test_every_name_that_speaks_of_repetitions_is_listed() -> None:
    found = {each for tree in trees().values() for each in speaking_names(tree)}
    assert found - LIMITS.keys() == set()
    assert {each for each in LIMITS.keys() - found if each.isidentifier()} == set()


def test_celery_repeats_nothing_by_itself() -> None:
    tasks: set[str] = set()
    for name, tree in trees().items():
        for path, function in functions(tree) if "task" in sources()[name] else ():
            made = [ast.unparse(each) for each in function.decorator_list]
            if any(re.search(r"\.(shared_)?task\b", each) for each in made):
                tasks.add(f"{name}::{path}")
                assert not re.search(r"retry|retries", "".join(made)), path
                assert ".retry(" not in ast.unparse(function), path
    assert tasks == TASKS.keys()
    assert 'task_publish_retry_policy={"max_retries": 2,' in sources()["services/kit/celery.py"]


def test_what_is_listed_says_all_of_it_and_names_what_exists() -> None:
    everything = "\n".join(sources().values())
    for name, listed in {**LOOPS, **LIMITS}.items():
        fields = [listed] if isinstance(listed, str) else [*listed]
        assert all(fields), name
        for word in re.findall(r"`([^`]+)`", " ".join(fields)):
            assert word in everything, f"{name}: nothing of the product has the name {word}"
