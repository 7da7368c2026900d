"""What operators set by environment variables keeps its names from release to release."""

from pathlib import Path

import pytest

from services.scheduler.settings import SchedulerSettings
from tests.scheduler.world import TOKEN


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("SCHEDULER_SETTING_CURVES", "/etc/curves.json", "control_curves", Path("/etc/curves.json")),
        ("SCHEDULER_MEASURES_SETTINGS", "false", "measures_controls", False),
        ("SCHEDULER_MEASURED_SETTINGS", "5", "measured_settings", 5),
    ],
)
def test_variables_of_earlier_releases_are_read(
    variable: str, text: str, field: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, text)
    assert getattr(SchedulerSettings(WATTSHIFT_SERVICE_TOKEN=TOKEN), field) == value
