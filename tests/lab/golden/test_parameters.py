"""A default of the lab's that moves changes what published results were compared with."""

from __future__ import annotations

import json

import pytest

from lab.policies.entries import ENTRIES
from tests.lab.golden.parameters import FILE, policies

GOLDEN = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("policy", sorted({*GOLDEN, *ENTRIES}))
def test_a_policy_has_the_parameters_and_defaults_that_are_checked_in(policy: str) -> None:
    assert policies().get(policy) == GOLDEN.get(policy)
