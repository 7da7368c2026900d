"""Commands and environments that no Linux node could start are refused where they are submitted."""

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from services.admission.submissions import Draft, read_submission
from services.contracts.jobs import JobSpec, SubmissionEntry
from services.contracts.serving import ServerProcess
from services.kit.problems import ProblemError
from services.kit.starts import START_BYTES, STRING_BYTES, check_start

BASE: dict[str, Any] = {"name": "a", "command": ["/bin/true"]}
WIDE = "\N{GRINNING FACE}" * 32_768  # 131,072 bytes; with the zero at its end one more than Linux takes


def _submitted(*jobs: dict[str, Any], batch: bool) -> Draft | ProblemError:
    body = json.dumps({"jobs": jobs} if batch else jobs[0])
    return read_submission(SubmissionEntry(tenant_id="t", key_id="k", idempotency_key=None, batch=batch, body=body))


def _with_total(total: int) -> dict[str, Any]:
    """Return a job whose command and environment have ``total`` bytes for execve, in strings as long as may be."""
    found: dict[str, Any] = BASE | {"environment": {}}
    left = total - len("/bin/true") - 1 - 8
    while left:
        size = left if left <= 90_000 else min(90_000, left - 100)
        letters, rest = divmod(size - len("V000=") - 1 - 8, 3)
        found["environment"][f"V{len(found['environment']):03}"] = "€" * letters + "x" * rest
        left -= size
    return found


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize(
    ("fields", "place", "said"),
    [
        ({"command": ["/bin/true", WIDE]}, "/command/1", "has 131,072 bytes"),
        ({"environment": {"V": WIDE}}, "/environment/V", "has 131,074 bytes"),
        ({"command": ["/bin/true", *[WIDE[1:]] * 15]}, "/command", "together"),
        ({"command": ["/bin/true", WIDE], "array": "0-9"}, "/command/1", "has 131,072 bytes"),
    ],
)
def test_what_linux_cannot_start_is_refused_whole(batch: bool, fields: dict[str, Any], place: str, said: str) -> None:
    found = _submitted(BASE, BASE | fields, batch=True) if batch else _submitted(BASE | fields, batch=False)
    assert isinstance(found, ProblemError)
    assert (found.status, [each.pointer for each in found.errors]) == (422, [("/jobs/1" if batch else "") + place])
    assert said in found.detail
    assert WIDE[:5] not in found.detail


def test_servers_of_pools_and_apps_are_checked_alike() -> None:
    server = ServerProcess(command=["serve", WIDE])
    with pytest.raises(ProblemError, match="/modes/3/command/1: has 131,072 bytes"):
        check_start({"/modes/3": server})


def test_a_stored_job_that_is_too_large_can_still_be_read() -> None:
    assert JobSpec.as_stored(BASE | {"command": ["/bin/true", WIDE]}).command[1] == WIDE


def _starts(job: dict[str, Any]) -> bool:
    stack = 8 * 1024 * 1024
    limited: Callable[[], None] = lambda: resource.setrlimit(resource.RLIMIT_STACK, (stack, stack))  # noqa: E731
    try:
        subprocess.run(job["command"], env=job.get("environment", {}), preexec_fn=limited, check=True)
    except OSError:
        return False
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="the limits are those of Linux")
def test_the_limits_are_those_of_execve() -> None:
    longest = BASE | {"command": ["/bin/true", WIDE[1:] + "x"]}
    largest = _with_total(START_BYTES)
    assert isinstance(_submitted(longest, batch=False), Draft)
    assert isinstance(_submitted(largest, batch=True), Draft)
    assert isinstance(_submitted(_with_total(START_BYTES + 1), batch=True), ProblemError)
    assert _starts(longest)
    assert _starts(largest)
    assert not _starts(BASE | {"command": ["/bin/true", WIDE]})
    assert not _starts(_with_total(START_BYTES + STRING_BYTES))
