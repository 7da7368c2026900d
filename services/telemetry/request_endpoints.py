"""What routers report to the ledger, over HTTP."""

from fastapi import APIRouter

from services.contracts.routing import UsageReceipt, UsageReport
from services.telemetry.endpoints import Service
from services.telemetry.repository.requests import replace_usages

router = APIRouter()


@router.post("/internal/request-usage")
async def report_usage(report: UsageReport, service: Service) -> UsageReceipt:
    """Take in what a router saw in a minute; reporting it again replaces it."""
    await replace_usages(service.database, report)
    return UsageReceipt(usages=len(report.usages))
