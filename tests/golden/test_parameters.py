"""A default of a policy that moves is a change for whoever runs it: it shows here, and is said in CHANGELOG.md."""

from __future__ import annotations

import json

import pytest

from tests.golden.parameters import FILE, policies

GOLDEN = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("policy", sorted(GOLDEN | policies()))
def test_a_policy_has_the_parameters_and_defaults_that_are_checked_in(policy: str) -> None:
    assert policies().get(policy) == GOLDEN.get(policy)
