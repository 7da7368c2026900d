"""HTTP endpoints for cells."""

from typing import Annotated

from fastapi import APIRouter, Query

from services.admission.cells.service import Cells
from services.contracts import cells as contracts
from services.contracts.invalid import NAME_PATTERN
from services.kit.identity import Admin, Operator
from services.kit.routes import from_state, named_by

TheCells = Annotated[Cells, from_state("cells")]
CellName = Annotated[str, named_by(NAME_PATTERN, "cell")]
router = APIRouter(tags=["cells"])


@router.get("/v1/cells")
async def list_cells(_: Operator, cells: TheCells) -> contracts.CellList:
    """List cells.

    They are other installations that run jobs of this one.
    """
    return await cells.list()


@router.post(
    "/v1/cells", status_code=201, responses={409: {"description": "There is a cell of this name: `conflict`."}}
)
async def add_cell(caller: Admin, spec: contracts.CellSpec, cells: TheCells) -> contracts.Cell:
    """Add a cell.

    It must answer to the key, which is never shown again.
    """
    return await cells.add(caller, spec)


@router.get("/v1/cells/{name}")
async def get_cell(_: Operator, name: CellName, cells: TheCells) -> contracts.Cell:
    """Get a cell."""
    return await cells.get(name)


@router.patch("/v1/cells/{name}")
async def change_cell(caller: Admin, name: CellName, change: contracts.CellChange, cells: TheCells) -> contracts.Cell:
    """Drain a cell, or use it again.

    A cell that is drained gets no new jobs. Those that wait there move elsewhere; those that were started stay.
    """
    return await cells.change(caller, name, change)


@router.delete("/v1/cells/{name}", status_code=204, responses={409: {"description": "It still has jobs: `conflict`."}})
async def remove_cell(
    caller: Admin, name: CellName, query: Annotated[contracts.CellQuery, Query()], cells: TheCells
) -> None:
    """Remove a cell.

    It must have no jobs of this installation any more, unless it is `lost`.
    """
    await cells.remove(caller, name, lost=query.lost)
