"""Requests and errors in the format of OpenAI's API."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import orjson

from services.contracts.codes import ProblemCode
from services.kit.edge.exchange import Header
from services.kit.problems import ProblemError
from services.router.forms import places
from services.router.kinds import Errors, Kind

JSON: Header = (b"content-type", b"application/json")
MOST_NESTED = 250
"""Levels of a body: orjson reads some 1,000 and writes 254, and a field of the body may have to be changed."""

NO_QUOTA = "insufficient_quota"
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
}
_CODES = {
    ProblemCode.UNAUTHENTICATED: "invalid_api_key",
    ProblemCode.RATE_LIMITED: "rate_limit_exceeded",
    ProblemCode.BODY_NOT_JSON: "invalid_json",
    ProblemCode.INTERNAL: "internal_error",
}


class DoorError(Exception):
    """A request that gets an error, in the format of the API by which it came."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        more: Sequence[Header] = (),
    ) -> None:
        super().__init__(message)
        self.status = status  #: HTTP status
        self.code = code  #: Stable code
        self.param = param  #: The field that is wrong
        self.retry_after_s = retry_after_s  #: When to try again
        self.more = more  #: Further headers of the answer

    @property
    def headers(self) -> list[Header]:
        """The answer's headers, besides its length."""
        if self.code == NO_QUOTA:
            return [JSON, (b"x-should-retry", b"false")]  # OpenAI's and Anthropic's clients go by it
        wait_s = self.retry_after_s
        retry = () if wait_s is None else ((b"retry-after", b"%d" % max(1, round(wait_s))),)
        return [JSON, *self.more, *retry]

    def body(self, form: Errors) -> bytes:
        return error_body(self.status, self.code, str(self), self.param, form)


def check_method(method: str, *allowed: str) -> None:
    """Refuse a method that a path does not answer; ``DoorError``: 405."""
    if method not in allowed:
        raise DoorError(405, "method_not_allowed", f"This path answers {' and '.join(allowed)}.")


def broken_off(kind: Kind, message: str, number: int) -> bytes:
    """Return the last event of a stream that broke off; ``number`` is that of the events before it."""
    if kind.errors == "responses":
        event = {"type": "error", "code": "upstream_broke_off", "message": message, "param": None}
        return b"event: error\ndata: " + orjson.dumps(event | {"sequence_number": number}) + b"\n\n"
    begin = b"event: error\ndata: " if kind.errors == "messages" else b"data: "
    return begin + error_body(502, "upstream_broke_off", message, None, kind.errors) + b"\n\n"


_ANTHROPIC = {
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(status: int, code: str, message: str, param: str | None = None, form: Errors = "chat") -> bytes:
    """Return an error in OpenAI's format, or in that of Anthropic's messages."""
    kind = _TYPES.get(status, "server_error")
    if form == "messages":
        kind = _ANTHROPIC.get(status, _TYPES.get(status, "api_error"))
        return orjson.dumps({"type": "error", "error": {"type": kind, "message": message}})
    kind = NO_QUOTA if code == NO_QUOTA else kind
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


def of_problem(problem: ProblemError) -> DoorError:
    """Return a refusal by the edge in OpenAI's format."""
    headers = {name.lower(): value for name, value in problem.headers.items()}
    wait = headers.get("retry-after")
    status = 400 if problem.status == 422 else problem.status
    return DoorError(
        status,
        _CODES.get(problem.problem_code, str(problem.problem_code)),
        problem.detail,
        retry_after_s=float(wait) if wait is not None and wait.isdigit() else None,
    )


@dataclass(slots=True)
class Asked:
    """What the router reads of a request's body; all of it is passed on unchanged."""

    content: bytes  #: The body
    fields: dict[str, Any]  #: The body, parsed
    model: str  #: The requested model; where ``name`` is an alias, the one that it stands for
    is_stream: bool  #: Whether the answer should be a stream
    wants_usage: bool  #: Whether the stream should end with a chunk that states the usage
    most_tokens: int | None  #: The longest answer that is allowed; None if it is not limited
    choices: int  #: How many answers are requested
    may_repeat: bool  #: Whether sending it twice changes nothing but the energy used
    session: str | None  #: What requests with much in common name alike: ``prompt_cache_key``, else ``user``
    name: str  #: The model's name as the body has it
    places: dict[str, tuple[int, int]] | None = None  #: Where the body has its fields if it is a form; None for JSON

    @property
    def is_flex(self) -> bool:
        """Whether it may wait for what others leave free."""
        return self.fields.get("service_tier") == "flex"

    def with_fields(self, **changes: Any) -> bytes:
        """Return the body with some fields changed or added; in a form only those are changed that it has."""
        if self.places is None:
            return orjson.dumps(self.fields | changes)
        content = self.content
        for name, (begin, end) in sorted(self.places.items(), key=lambda each: -each[1][0]):
            if name in changes:
                content = content[:begin] + str(changes[name]).encode() + content[end:]
        return content


def read(content: bytes, boundary: bytes | None = None, *, may_repeat: bool = True) -> Asked:
    """Read what the router needs of a body; the model server judges the rest.

    Args:
        boundary: What separates its parts if it is a form.
        may_repeat: Whether requests of its kind may be sent twice.

    Raises:
        DoorError: It is neither a JSON object nor a form, or has no usable model.
    """
    if boundary is None:
        return _asked(content, _object(content), None, may_repeat)
    try:
        found = places(content, boundary)
    except ValueError as error:
        raise DoorError(400, "invalid_form", str(error)) from None
    fields: dict[str, Any] = {name: content[at:end].decode(errors="replace") for name, (at, end) in found.items()}
    if (stream := fields.get("stream")) is not None:
        fields["stream"] = stream.strip().lower() in ("true", "1")
    return _asked(content, fields, found, may_repeat)


def _object(content: bytes) -> dict[str, Any]:
    try:
        found = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise DoorError(400, "invalid_json", f"The body is not valid JSON: {error}.") from None
    if not isinstance(found, dict):
        raise DoorError(400, "invalid_json", "The body must be a JSON object.")
    if content.count(b"[") + content.count(b"{") > MOST_NESTED:  # few bodies; only these can be nested so deeply
        try:
            orjson.dumps(found)
        except TypeError:
            raise DoorError(400, "invalid_json", "The body is nested too deeply.") from None
    return cast("dict[str, Any]", found)


def _asked(content: bytes, fields: dict[str, Any], at: dict[str, tuple[int, int]] | None, may_repeat: bool) -> Asked:
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        raise DoorError(400, "missing_model", "Name the model to use.", param="model")
    if len(model) > 200:
        raise DoorError(404, "model_not_found", "There is no model of this name.", param="model")
    stream = fields.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise DoorError(400, "invalid_value", "stream must be true or false.", param="stream")
    options = fields.get("stream_options")
    wants_usage = isinstance(options, dict) and cast("dict[str, Any]", options).get("include_usage") is True
    most = None
    for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        if name in fields and (most := fields[name]) is not None:
            break
    choices = fields.get("n")
    session = None
    for name in ("prompt_cache_key", "user"):
        if isinstance(given := fields.get(name), str) and given:
            session = given
            break
    return Asked(
        content=content,
        fields=fields,
        model=model,
        is_stream=stream is True,
        wants_usage=wants_usage,
        most_tokens=most if isinstance(most, int) and not isinstance(most, bool) and most >= 0 else None,
        choices=choices if isinstance(choices, int) and not isinstance(choices, bool) and 0 < choices <= 1_000 else 1,
        may_repeat=may_repeat and fields.get("store") is not True and fields.get("background") is not True,
        session=session,
        name=model,
        places=at,
    )


def prompt_of(fields: dict[str, Any]) -> list[str]:
    """Return the texts of a prompt in order: those of messages, of a completion's prompt, or of what is embedded."""
    texts: list[str] = []
    for name in ("system", "instructions"):
        if name in fields:
            _collect(fields[name], texts)
    for message in _list(fields.get("messages")):
        if isinstance(message, dict):
            _collect(cast("dict[str, Any]", message).get("content"), texts)
    for name in ("prompt", "input", "query", "documents", "text_1", "text_2"):
        if name in fields:
            _collect(fields[name], texts)
    return texts


def extra_length(fields: dict[str, Any]) -> int:
    """Return the length in bytes of the definitions of tools, which are part of the prompt."""
    tools = fields.get("tools")
    return len(orjson.dumps(tools)) if tools else 0


def _collect(value: Any, texts: list[str]) -> None:
    if isinstance(value, str):
        texts.append(value)
        return
    for part in _list(value):
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict):
            text = cast("dict[str, Any]", part).get("text")
            if isinstance(text, str):
                texts.append(text)
            elif "content" in part:
                _collect(cast("dict[str, Any]", part)["content"], texts)


def token_ids(fields: dict[str, Any]) -> int:
    """Return the number of tokens of a prompt given as token ids; 0 for any other prompt."""
    for name in ("prompt", "input"):
        given = _list(fields.get(name))
        if given and isinstance(given[0], int):
            return len(given)
        if given and isinstance(given[0], list):
            return sum(len(_list(each)) for each in given)
    return 0


def _list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []
