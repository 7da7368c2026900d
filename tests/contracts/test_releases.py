"""An agent and a control plane that are a release apart understand each other's messages."""

import copy
import json
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from services.contracts import nodes
from services.contracts.clocks import ClockPolicy
from services.contracts.schema import NodeMessage, NodeValue
from services.core.domain.controls import ControlKind
from services.scheduler.ingest.gangs import EndReason, ShareReport

RECORDED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "nodes" / "release_0_1_0.json").read_text(encoding="utf-8")
)
"""Messages as release 0.1.0 sent and read them, every field written out, by the name of their class."""


def model_of(name: str) -> type[BaseModel]:
    return getattr(nodes, name)


def from_the_future(document: Any) -> Any:
    """Return a message with a field that nobody knows yet wherever there may be one."""
    if isinstance(document, dict):
        known = {name: from_the_future(value) for name, value in document.items()}
        return known if is_a_table(document) else {**known, "of_a_later_release": {"vault": 1}}
    if isinstance(document, list):
        return [from_the_future(each) for each in document]
    return document


def is_a_table(document: dict[str, Any]) -> bool:
    return document in ({"rack": "a"}, {"clock": "no"})


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_message_is_read_and_written_as_it_was(name: str) -> None:
    message = model_of(name).model_validate(RECORDED[name])
    assert json.loads(message.model_dump_json()) == RECORDED[name]


@pytest.mark.parametrize("name", RECORDED)
def test_what_a_later_release_adds_is_ignored(name: str) -> None:
    future = from_the_future(copy.deepcopy(RECORDED[name]))
    assert future != RECORDED[name]
    assert model_of(name).model_validate(future) == model_of(name).model_validate(RECORDED[name])


def models_in(model: type[BaseModel]) -> set[type[BaseModel]]:
    found = {model}
    waiting = [field.annotation for field in model.model_fields.values()]
    while waiting:
        annotation = waiting.pop()
        waiting += get_args(annotation)
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            found |= models_in(annotation)
    return found


def values_in(annotation: Any) -> set[type[StrEnum]]:
    found = set[type[StrEnum]]().union(*map(values_in, get_args(annotation)))
    return found | {annotation} if isinstance(annotation, type) and issubclass(annotation, StrEnum) else found


# Agents have the first two of these from commands; a rank's state is what the protocol is about, and known or refused.
OF_AGENTS = sorted(
    {
        (model.__name__, name, values)
        for sent in (nodes.Heartbeat, nodes.EnergyReport)
        for model in models_in(sent)
        for name, field in model.model_fields.items()
        for values in values_in(field.annotation) - {ClockPolicy, ControlKind, nodes.RankState}
    },
    key=str,
)


@pytest.mark.parametrize(("model", "field", "values"), OF_AGENTS)
def test_a_value_of_a_later_release_costs_no_heartbeat(model: str, field: str, values: type[StrEnum]) -> None:
    class Sent(NodeMessage):
        value: values  # pyright: ignore[reportInvalidTypeForm]

    assert issubclass(values, NodeValue), f"{model}.{field}"
    read = Sent.model_validate_json('{"value": "of_a_later_release"}')
    assert read.value is values(values.unknown)
    with pytest.raises(ValidationError):
        Sent.model_validate_json('{"value": 1}')


def test_a_rank_that_ended_as_only_a_later_release_knows_has_exited() -> None:
    heartbeat = copy.deepcopy(RECORDED["Heartbeat"])
    heartbeat["ranks"][0] |= {"state": "exited", "exit_code": 126, "ended_by": "eaten", "listener": "somebody"}
    rank = nodes.Heartbeat.model_validate_json(json.dumps(heartbeat)).ranks[0]
    assert (rank.exit_code, rank.ended_by, rank.listener) == (126, nodes.EndedBy.OTHER, nodes.Listener.UNCHECKED)
    assert ShareReport(rank.state, rank.exit_code, rank.ended_by).broke_off is EndReason.FAILED


@pytest.mark.parametrize("name", RECORDED)
def test_the_recorded_messages_have_every_field_there_is(name: str) -> None:
    """A field that is added later is recorded, too, once it was released; then the file gets that release's name."""
    assert all(issubclass(model, NodeMessage) for model in models_in(model_of(name)))
    keys = {key for key in json.dumps(RECORDED[name]).split('"') if key.isidentifier()}
    for model in models_in(model_of(name)):
        known = {field.serialization_alias or key for key, field in model.model_fields.items()}
        assert known <= keys, model
