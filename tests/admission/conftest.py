"""Admission in this process, on a real database: the same app, without a socket."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.admission.app import create_app
from services.admission.settings import AdmissionSettings
from tests.admission.installation import Admission
from tests.support.servers import as_service
from tests.support.services import TOKEN


@pytest.fixture(scope="module")
async def admission(
    database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Admission]:
    """Admission as its callers see it; a module's tests share it."""
    folder = tmp_path_factory.mktemp("admission")
    async with admission_on(database_url, redis_url, folder, capacity_max_age_s=0.001) as found:
        yield found


def admission_on(database_url: str, redis_url: str, folder: Path, **settings: Any) -> Admission:
    """Return admission on these servers; enter it to start it."""
    chosen = AdmissionSettings(
        database_url=database_url,
        redis_url=as_service(redis_url, "admission"),
        service_token=TOKEN,
        data_dir=folder,
        **settings,
    )
    return Admission(create_app(chosen), database_url)
