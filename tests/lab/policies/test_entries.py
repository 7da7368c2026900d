"""The lab's policies join by the door that other packages use, and say what is wrong with their parameters."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import lab
from lab.policies.entries import ENTRIES
from services.core.domain.errors import PolicyConfigError
from services.core.policies.parameters import describe_parameters
from services.core.policies.registry import ALIASES, LAB, POLICIES, PolicyEntry, build_policy, policy_entry, policy_name
from services.kit.plugins import load_plugins
from services.kit.policies import GROUP, load_policies
from services.kit.release import RELEASE


def test_every_policy_of_the_lab_is_an_entry_point_and_the_product_knows_where_it_is() -> None:
    declared = tomllib.loads((Path(lab.__file__).with_name("pyproject.toml")).read_text(encoding="utf-8"))
    project = declared["project"]
    points = project["entry-points"][GROUP]

    assert (project["version"], project["dependencies"]) == (RELEASE, [f"wattshift-control-plane[control]=={RELEASE}"])

    assert list(points) == list(ENTRIES) == sorted(LAB)
    assert set(ALIASES.values()) <= LAB
    assert {each.name: each.value for each in load_plugins(GROUP, PolicyEntry) if each.name in LAB} == ENTRIES


def test_defaults_build_every_policy() -> None:
    load_policies()
    assert [build_policy(name, {}).name for name in ENTRIES] == list(ENTRIES)
    assert ENTRIES.items() <= POLICIES.items()


def test_a_mistake_is_named_with_a_pointer() -> None:
    with pytest.raises(PolicyConfigError, match="given twice") as caught:
        build_policy("gandiva", {"quantum_s": 30.0, "time_slice_s": 60.0})
    assert caught.value.pointer == "/time_slice_s"


def test_a_former_name_is_accepted() -> None:
    assert build_policy("gandiva", {"time_slice_s": 30.0}).config == build_policy("gandiva", {"quantum_s": 30.0}).config


def test_a_policy_of_the_lab_is_shared_between_tenants_under_any_of_its_names() -> None:
    entry = policy_entry("fair+las+zeus")

    assert policy_name("fair+las+zeus") == build_policy("fair+las+zeus", {"eta": 1.0}).name == "fair+zeus+las"
    assert {"eta", "share_half_life_s"} <= {each.name for each in describe_parameters(entry.config)}
