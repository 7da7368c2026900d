"""Jobs named by id, by the beginning of an id, or by name; and what is said of them."""

from __future__ import annotations

import json

import pytest

from services.cli.client import Gateway
from services.cli.commands import EXIT_NOT_FOUND, EXIT_USAGE, CliError
from services.cli.jobs import jobs as commands
from services.cli.jobs.following import ended_words
from services.cli.jobs.names import job_id, job_or_array, path_of
from tests.cli.conftest import Run


def submitted(run: Run, name: str, *words: str) -> str:
    return run("submit", "--name", name, *words, "--", "true").strip()


def test_a_job_goes_by_its_name_and_by_the_beginning_of_its_id(run: Run, gateway: Gateway) -> None:
    mine, other = submitted(run, "sparrow"), submitted(run, "finch")

    assert job_id(gateway, mine) == job_id(gateway, "sparrow") == mine
    assert job_id(gateway, other[:-1]) == job_id(gateway, other.removeprefix("job_")[:-1]) == other
    assert json.loads(run("cancel", "sparrow", "--json"))[0]["id"] == mine


def test_a_job_goes_by_its_number_and_a_task_by_that_of_its_array(run: Run, gateway: Gateway) -> None:
    single, array = submitted(run, "numbered"), submitted(run, "numbered-array", "--array", "3-4")
    number, of_array = (gateway.get(path_of(each))["number"] for each in (single, array))

    assert of_array == number + 1
    assert job_or_array(gateway, str(number)) == job_or_array(gateway, f"#{number}") == single
    assert job_or_array(gateway, f"{of_array}") == array
    task = job_id(gateway, f"#{of_array}.4")
    assert gateway.get(path_of(task))["name"] == "numbered-array.4"
    assert job_id(gateway, f"{of_array}.4") == task
    for word in (f"#{of_array}.5", f"#{number}.0", "#999999999"):
        with pytest.raises(CliError, match="there is no job"):
            job_or_array(gateway, word)
    assert f"#{number} " in run("jobs")
    assert f"#{of_array}" in run("job", str(of_array))
    assert f"#{of_array}.4 " in run("jobs", "--array", str(of_array))
    assert "It is cancelled." in run("cancel", str(number))
    waits = submitted(run, "waits", "--after", f"any:#{number}", "--after", f"ok:{of_array}")
    assert gateway.get(path_of(waits))["spec"]["after"] == {"ok": [array], "any": [single], "not_ok": None}


def test_a_name_wins_over_a_number_but_not_where_it_is_written_as_one(run: Run, gateway: Gateway) -> None:
    number = gateway.get(path_of(first := submitted(run, "to-be-hidden")))["number"]
    called = submitted(run, str(number))

    assert job_id(gateway, str(number)) == called
    assert job_id(gateway, f"#{number}") == first


def test_a_number_of_two_tenants_is_ambiguous_to_an_operator(run: Run, gateway: Gateway) -> None:
    gateway.call("POST", "/v1/tenants", body={"id": "numbers"})
    key = gateway.call("POST", "/v1/keys", body={"tenant_id": "numbers", "role": "user"})
    theirs = Gateway(gateway.url, key["secret"])
    while (made := theirs.call("POST", "/v1/jobs", body={"name": "b", "command": ["true"]}))["number"] < 2:
        pass
    mine = gateway.pages("/v1/jobs", 1, number=2, tenant="default") or gateway.pages("/v1/arrays", 1, number=2)

    with pytest.raises(CliError, match="'#2' is ambiguous") as refused:
        job_or_array(gateway, "#2")

    assert mine[0]["id"] in str(refused.value)
    assert made["id"] in str(refused.value)
    assert job_id(theirs, "#2") == made["id"]


def test_an_ambiguous_name_lists_the_jobs_and_does_nothing(run: Run, gateway: Gateway) -> None:
    ids = [submitted(run, "twin"), submitted(run, "twin")]

    with pytest.raises(CliError, match="'twin' is ambiguous") as refused:
        run("cancel", ids[0], "twin")

    assert refused.value.exit_code == EXIT_USAGE
    assert all(each in str(refused.value) for each in ids)
    assert {gateway.get(f"/v1/jobs/{each}")["state"] for each in ids} == {"queued"}
    with pytest.raises(CliError, match="is ambiguous"):
        job_id(gateway, ids[0][:8])


def test_of_several_of_one_name_the_one_that_has_not_ended_is_meant(run: Run, gateway: Gateway) -> None:
    first, second = submitted(run, "rerun"), submitted(run, "rerun")
    run("cancel", first)
    assert job_id(gateway, "rerun") == second
    run("cancel", second)
    with pytest.raises(CliError, match="is ambiguous"):
        job_id(gateway, "rerun")


@pytest.mark.parametrize("word", ["nobody-has-it", "job_zzzz", "%", "a/b", "job_none"])
def test_what_names_no_job_is_not_found(gateway: Gateway, word: str) -> None:
    with pytest.raises(CliError, match="there is no job") as refused:
        job_id(gateway, word)
    assert refused.value.exit_code == EXIT_NOT_FOUND


def test_lists_are_narrowed_by_user_state_and_age(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "grace")
    mine, held = submitted(run, "a"), submitted(run, "b", "--hold")
    monkeypatch.setenv("LOGNAME", "alan")
    submitted(run, "c")
    monkeypatch.setenv("LOGNAME", "grace")

    def listed(*words: str) -> list[str]:
        return [job["id"] for job in json.loads(run("jobs", "--json", *words))]

    assert listed("--mine", "--since", "1h") == [held, mine]
    assert listed("--mine", "--state", "held,running") == [held]
    assert listed("--mine", "--since", "2999-01-01") == []
    with pytest.raises(CliError, match="--since: 'soon' is neither an age"):
        listed("--since", "soon")
    with pytest.raises(CliError, match="--watch needs a terminal"):
        run("jobs", "--watch")


@pytest.mark.parametrize(
    ("action", "state", "says"),
    [
        ("hold", "queued", "waits until it is released"),
        ("cancel", "queued", "It is cancelled."),
        ("hold", "running", "It is being stopped; it has 120 s to save its work, and waits then until"),
        ("cancel", "running", "It is being stopped; it has 120 s to save its work, and is cancelled then."),
        ("release", "queued", "It is queued again."),
        ("release", "running", "It is running."),
    ],
)
def test_a_command_says_what_happens_next(action: str, state: str, says: str) -> None:
    assert says in commands.what_follows(action, {"state": state, "spec": {"grace_s": 120.0}})


def test_a_job_is_shown_in_words(run: Run) -> None:
    submitted(run, "shown", "--hold")
    said = run("hold", "shown")
    assert "shown: It waits until it is released." in said


FOOTPRINT = {"energy_j": 7_200.0, "carbon_gco2": 1.0}


@pytest.mark.parametrize(
    ("job", "says"),
    [
        ({"state": "succeeded", "detail": None}, "a succeeded (2.00 Wh, 1.00 g CO2 recorded so far)"),
        ({"state": "failed", "detail": "It exited with status 2.", "exit_code": 2}, "a failed with exit code 2: It"),
        ({"state": "failed", "detail": "cannot enter the working directory /x", "exit_code": None}, "a failed: cannot"),
        ({"state": "cancelled", "detail": None}, "a was cancelled"),
    ],
)
def test_the_end_of_a_job_is_a_sentence(job: dict[str, object], says: str) -> None:
    assert ended_words({"name": "a", "footprint": FOOTPRINT, **job}).startswith(says)


def test_a_key_of_a_user_and_a_project_submits_to_it_and_lists_its_users_jobs(
    run: Run, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.call("POST", "/v1/tenants/default/users", body={"name": "ida"})
    submitted(run, "others", "--label", "user=ida", "--project", "fish")
    key = gateway.call("POST", "/v1/keys", body={"tenant_id": "default", "user": "ida", "project": "birds"})
    monkeypatch.setenv("WATTSHIFT_API_KEY", key["secret"])
    mine = submitted(run, "own")
    with pytest.raises(CliError, match="limited to the project birds"):
        submitted(run, "wrong", "--project", "fish")

    assert [(job["id"], job["project"]) for job in json.loads(run("jobs", "--mine", "--json"))] == [(mine, "birds")]


def test_a_name_that_no_node_can_have_is_refused_before_anything_is_asked(run: Run) -> None:
    with pytest.raises(CliError, match=r"the name of a node .*not 'bad name'") as refused:
        run("nodes", "enroll", "bad name")
    assert refused.value.exit_code == EXIT_USAGE
