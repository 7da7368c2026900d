"""The lines of a batch's input file, and what is wrong with them."""

from collections.abc import Collection
from typing import Any, cast

import orjson

from services.contracts.batches import LineError
from services.contracts.identity import KeyLimits
from services.core.domain.canaries import point_of
from services.serving.repository.batch_work import Line

MOST_ERRORS = 100
LONGEST_ID = 512


class LineReader:
    """Reads lines one after the other."""

    def __init__(self, endpoint: str, limits: KeyLimits, models: Collection[str], most_lines: int) -> None:
        """Take the batch's endpoint, what its key may do, the models of its tenant, and how many lines there may be."""
        self._endpoint, self._limits = endpoint, limits
        self._models, self._most_lines = models, most_lines
        self._ids: set[str] = set()
        self.errors: list[LineError] = []  #: What is wrong, at most ``MOST_ERRORS``
        self.total = 0  #: How many lines there are so far; empty ones do not count

    def read(self, number: int, content: bytes) -> Line | None:
        """Return a line, counted from 1; None if it is empty or wrong."""
        if not content.strip():
            return None
        self.total += 1
        if self.total > self._most_lines:
            if self.total == self._most_lines + 1:
                self._note(number, "too_many_requests", f"A batch has at most {self._most_lines} requests.")
            return None
        try:
            found = orjson.loads(content)
        except ValueError as error:
            return self._note(number, "invalid_json_line", f"This line is not JSON: {error}.")
        if not isinstance(found, dict):
            return self._note(number, "invalid_json_line", "This line is not a JSON object.")
        line = cast("dict[str, Any]", found)
        custom_id, body = line.get("custom_id"), line.get("body")
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= LONGEST_ID or "\0" in custom_id:
            detail = f"custom_id must be a text of 1 to {LONGEST_ID} characters, none of them U+0000."
            return self._note(number, "invalid_custom_id", detail, "custom_id")
        if custom_id in self._ids:
            return self._note(
                number, "duplicate_custom_id", f"{custom_id} is the custom_id of another line.", "custom_id"
            )
        self._ids.add(custom_id)
        if line.get("method") != "POST":
            return self._note(number, "invalid_method", "method must be POST.", "method")
        if line.get("url") != self._endpoint:
            return self._note(number, "mismatched_url", f"url must be the batch's endpoint, {self._endpoint}.", "url")
        fields = cast("dict[str, Any]", body) if isinstance(body, dict) else {}
        name = fields.get("model")
        if not isinstance(name, str) or not name:
            return self._note(number, "missing_required_parameter", "body must be an object with a model.", "body")
        if fields.get("stream"):
            return self._note(number, "invalid_request", "Answers of a batch are not streamed.", "body.stream")
        named = fields.get("prompt_cache_key"), fields.get("user")
        session = next((each for each in named if isinstance(each, str) and each), None)
        model = self._limits.model_of(name, point_of(session, self.total), self._models.__contains__)
        if model is None or model not in self._models:
            detail = f"The model {name[:200]} does not exist or you do not have access to it."
            return self._note(number, "model_not_found", detail, "body.model")
        return Line(number, custom_id, model, orjson.dumps(body).decode())

    def check_whole(self) -> None:
        """Note what is wrong with the file as a whole."""
        if not self.total:
            self._note(None, "empty_file", "The file has no requests.")

    def _note(self, number: int | None, code: str, message: str, param: str | None = None) -> None:
        if len(self.errors) < MOST_ERRORS:
            stored = message.replace("\0", "\N{SYMBOL FOR NULL}")  # PostgreSQL has no U+0000
            self.errors.append(LineError(code=code, message=stored, line=number, param=param))
