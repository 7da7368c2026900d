"""What is said about settings that are wrong."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.kit.settings import SharedSettings, settings_faults, variable_of
from tests.support.servers import ROOT

TOKEN = {"WATTSHIFT_SERVICE_TOKEN": "a-token-of-sixteen-and-more"}


class OvenSettings(SharedSettings):
    model_config = SettingsConfigDict(env_prefix="OVEN_")

    heat_s: float = Field(1_800, gt=0)
    racks: tuple[int, int] = (1, 2)
    door: int = Field(8000, ge=0, le=65_535)
    pause_s: float = Field(1.0, ge=0, validation_alias="OVEN_PAUSE_S")


@pytest.mark.parametrize(
    ("environment", "fault"),
    [
        ({"OVEN_HEAT_S": "abc"}, "OVEN_HEAT_S=abc: must be a valid number (default 1800)"),
        ({"OVEN_HEAT_S": "0"}, "OVEN_HEAT_S=0: must be greater than 0 (default 1800)"),
        ({"OVEN_DOOR": "99999"}, "OVEN_DOOR=99999: must be less than or equal to 65535 (default 8000)"),
        ({"OVEN_DOOR": "1.5"}, "OVEN_DOOR=1.5: must be a valid integer (default 8000)"),
        ({"OVEN_RACKS": "a,b"}, "OVEN_RACKS=a,b: must be JSON"),
        ({"OVEN_PAUSE_S": "-1"}, "OVEN_PAUSE_S=-1: must be greater than or equal to 0 (default 1.0)"),
        ({"WATTSHIFT_SERVICE_TOKEN": "short"}, "WATTSHIFT_SERVICE_TOKEN: must have at least 16 characters"),
    ],
)
def test_a_fault_is_one_line_with_variable_value_and_what_is_right(environment: dict[str, str], fault: str) -> None:
    assert settings_faults(OvenSettings, {**TOKEN, **environment}) == [fault]


def test_a_missing_secret_is_named_and_the_environment_is_as_before() -> None:
    before = dict(os.environ)
    assert settings_faults(OvenSettings, {}) == [
        "WATTSHIFT_SERVICE_TOKEN is not set: Secret by which the services recognise each other."
    ]
    assert settings_faults(OvenSettings, TOKEN) == []
    assert dict(os.environ) == before
    assert variable_of(OvenSettings, "heat_s") == "OVEN_HEAT_S"


@pytest.mark.parametrize(
    ("module", "environment", "line"),
    [
        ("gateway.app", {}, "WATTSHIFT_SERVICE_TOKEN is not set: Secret by which"),
        ("services.admission.app", TOKEN, "DATABASE_URL must be the postgresql:// address of a server"),
    ],
)
def test_a_process_with_a_wrong_setting_ends_with_one_line(module: str, environment: dict[str, str], line: str) -> None:
    left_out = {"WATTSHIFT_SERVICE_TOKEN", "DATABASE_URL"}
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    ended = subprocess.run(
        [sys.executable, "-m", module], cwd=ROOT, env={**kept, **environment}, capture_output=True, text=True
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith(line)
    assert len(ended.stderr.splitlines()) == 1
