"""Where the models are served: read from serving again and again, and kept on disk for when serving does not answer."""

from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from services.contracts.routing import HeldRequests, RoutingTable
from services.kit.files import whole
from services.kit.http import ServiceClient
from services.kit.logging import Log
from services.kit.problems import ProblemError

log = Log(__name__)


class TableReader:
    """Reads the routing table, and reports how many requests are held at draining servers."""

    def __init__(
        self,
        serving: ServiceClient,
        path: Path,
        router: str,
        adopt: Callable[[RoutingTable], None],
        draining: Callable[[], dict[str, int]],
    ) -> None:
        """Take what to call with a new table, and what returns the requests held at draining servers, by id."""
        self._serving, self._path, self._router = serving, path, router
        self._adopt, self._draining = adopt, draining
        self._kept: str | None = None
        self.is_known = False
        self.is_empty = False

    def read_kept(self) -> None:
        """Load the last known table, so that a router that starts without serving routes as before."""
        try:
            table = RoutingTable.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return
        except (OSError, ValidationError) as error:
            log.warning("table.not_read", path=str(self._path), error=str(error)[:200])
            return
        self._adopt(table)
        self.is_known = True
        log.info("table.kept", servers=len(table.servers), made_at=table.made_at.isoformat())

    async def look(self) -> None:
        """Read the table once; ``ProblemError`` while serving does not answer: the last one stays in force."""
        table = await self._serving.call("GET", "/internal/routing", RoutingTable, attempts=1, timeout_s=2)
        self._adopt(table)
        self.is_known, self.is_empty = True, not (table.pools or table.servers or table.apps)
        self._keep(table)
        held = self._draining()
        if held:
            try:
                report = HeldRequests(router=self._router, held=held)
                await self._serving.request("POST", "/internal/routing/held", body=report, timeout_s=2)
            except ProblemError as error:
                log.warning("held.not_reported", error=error.detail)

    def _keep(self, table: RoutingTable) -> None:
        document = table.model_dump_json(exclude={"made_at"})
        if document == self._kept:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with whole(self._path) as part:
                part.write_text(table.model_dump_json())
            self._kept = document
        except OSError as error:
            log.warning("table.not_kept", path=str(self._path), error=str(error))
