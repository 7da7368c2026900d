"""Slim lists: a query's `fields` names the fields of each row that the answer should contain."""

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

FIELDS = "fields"
ALL_FIELDS = "Only these fields of each of `{rows}`: `fields=id,state`, or repeated. By default, all."


@dataclass(frozen=True)
class FieldsOf:
    """Marks a query's ``fields``, a list of text, as names of fields of ``row``; commas may separate them too."""

    row: type[BaseModel]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._read, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return how the API's description shows it."""
        return {"type": "array", "items": {"type": "string", "enum": list(self.row.model_fields)}}

    def _read(self, value: Any) -> list[str]:
        given: list[Any] = list(value) if isinstance(value, list | tuple) else [value]  # pyright: ignore[reportUnknownArgumentType]
        names = [name.strip() for each in given for name in str(each).split(",")]
        for name in names:
            if name not in self.row.model_fields:
                raise ValueError(f"must be some of {', '.join(self.row.model_fields)}, not {name[:60]!r}")
        return names


def slim(answer: BaseModel, fields: list[str], rows: str = "items") -> str:
    """Return an answer as JSON whose ``rows`` have only these fields; all of them if none is named."""
    if not fields:
        return answer.model_dump_json()
    kept: dict[str, Any] = dict.fromkeys(type(answer).model_fields, True)
    return answer.model_dump_json(include={**kept, rows: {"__all__": set(fields)}})
