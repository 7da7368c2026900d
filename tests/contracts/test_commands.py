"""Commands between a scheduler and agents of other releases."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from services.contracts.commands import (
    SetDevices,
    StartGang,
    StopGang,
    UnknownFieldsError,
    command_document,
    read_command,
)

RECORDED: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "commands" / "release_0_1_0.json").read_text(encoding="utf-8")
)
"""Commands as release 0.1.0 sent them, every field written out. Its agents refuse any other field."""
START, STOP, SET = RECORDED


def paths(document: Any, at: str = "") -> set[str]:
    """Return the paths of all fields of a document; entries of lists are not told apart."""
    if isinstance(document, dict):
        below = [paths(value, f"{at}.{name}") | {f"{at}.{name}"} for name, value in document.items()]
        return set().union(*below)
    if isinstance(document, list):
        return set().union(*(paths(value, at) for value in document))
    return set()


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda each: each["type"])
def test_a_recorded_command_is_read_and_sent_without_fields_its_agents_refuse(recorded: dict[str, Any]) -> None:
    command = read_command(recorded)
    sent = command_document(command)

    assert paths(sent) <= paths(recorded)
    assert read_command(sent) == command


def test_what_is_sent_says_all_that_is_not_a_default() -> None:
    sent = command_document(read_command(START))

    assert sent["spec"]["gpus"] == {"max": 4}
    assert sent["spec"]["work"] == {"total": 30_000.0}
    assert not {"image", "deadline", "service", "priority"} & set(sent["spec"])
    assert {name for name in START if name not in sent} == set()


def test_a_gang_to_start_with_unknown_fields_is_refused_by_their_names() -> None:
    future = copy.deepcopy(START)
    future["vault"] = "a"
    future["spec"]["gpus"]["sharing"] = "time"

    with pytest.raises(UnknownFieldsError) as raised:
        read_command(future)

    assert raised.value.allocation_id == START["allocation_id"]
    assert raised.value.fields == ["spec.gpus.sharing", "vault"]


def test_unknown_fields_of_a_command_that_starts_nothing_are_ignored() -> None:
    stop = read_command({**STOP, "signal": "SIGUSR1"})
    controls = read_command({**SET, "settings": {**SET["settings"], "memory_clock_mhz": 900}, "why": "green"})

    assert stop == StopGang.model_validate(STOP)
    assert controls == SetDevices.model_validate(SET)


def test_an_unknown_field_beside_another_fault_does_not_hide_it() -> None:
    with pytest.raises(ValidationError, match="generation"):
        read_command({**START, "generation": "first", "vault": "a"})
    with pytest.raises(ValidationError, match="reboot"):
        read_command({"type": "reboot", "allocation_id": "a"})


def test_a_gang_that_a_newer_agent_accepted_is_still_known_after_a_downgrade() -> None:
    future = copy.deepcopy(START)
    future["spec"]["vault"] = ["a"]

    assert StartGang.as_stored(future) == StartGang.model_validate(START)
    with pytest.raises(ValidationError):
        StartGang.as_stored({"job_id": "job_01"})
