"""The endpoints of model servers that pass through the router: one row for each, and one for all that have none.

What a row does not say is read the same way from all: the model is a field of the body (JSON, or a part of a form), and
``usage`` has the tokens under the names of either API, beside the answer or in its ``response`` or ``message``.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal, cast

Errors = Literal["chat", "responses", "messages"]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of request."""

    route: str  #: What traces and logs call it
    is_answer: bool = False  #: Whether it is answered with tokens, whose number is predicted
    asks_usage: bool = False  #: Whether a stream states its usage only if it is asked to by ``stream_options``
    token_mark: bytes = b""  #: What each event of a stream with a token contains; empty if every event is one
    errors: Errors = "chat"  #: The form of its errors
    may_repeat: bool = True  #: Whether sending it twice changes nothing but the energy used
    is_json: bool = True  #: Whether its whole answers are JSON; others pass as they come
    operation: str = "generate_content"  #: OpenTelemetry's name of what is done


_AUDIO = ("/v1/audio/transcriptions", "/v1/audio/translations")
_FILES = ("/v1/audio/speech", "/v1/images/generations", "/v1/images/edits", "/v1/images/variations")
_OTHERS = (
    *("/v1/moderations", "/v1/messages/count_tokens", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"),
    *("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "/pooling", "/classify"),
)
KINDS = {
    "/v1/chat/completions": Kind("/v1/chat/completions", is_answer=True, asks_usage=True, operation="chat"),
    "/v1/completions": Kind("/v1/completions", is_answer=True, asks_usage=True, operation="text_completion"),
    "/v1/responses": Kind("/v1/responses", is_answer=True, token_mark=b'.delta"', errors="responses"),
    "/v1/messages": Kind("/v1/messages", is_answer=True, token_mark=b'"content_block_delta"', errors="messages"),
    **{path: Kind(path, is_answer=True, token_mark=b'.delta"', is_json=False) for path in _AUDIO},
    **{path: Kind(path, token_mark=b'.delta"', is_json=False) for path in _FILES},
    **{path: Kind(path, errors="messages" if "messages" in path else "chat") for path in _OTHERS},
    "/v1/embeddings": Kind("/v1/embeddings", operation="embeddings"),
}
OTHER = Kind("/v1/{path}", token_mark=b'.delta"', may_repeat=False, is_json=False)
_PATH = re.compile(r"/v1(/[A-Za-z0-9][A-Za-z0-9._:-]*)+")
_OURS = re.compile(r"/v1/(models|files|batches)(/.*)?")
_ADMINISTERS = re.compile(r"(un)?load|adapter|admin|reset|sleep|wake|profile|cache|weights|fine_tun", re.IGNORECASE)
"""What servers are administered by is not for their users, whatever model they name."""


def kind_of(path: str) -> Kind | None:
    """Return the kind of a request by its path; None if the path is not for model servers."""
    found = KINDS.get(path)
    if found is None and _PATH.fullmatch(path) and not _OURS.fullmatch(path) and not _ADMINISTERS.search(path):
        return OTHER
    return found


def tokens_of(document: dict[str, Any]) -> tuple[int | None, int | None]:
    """Return the tokens of prompt and answer that an answer, or an event of one, states; None where it does not."""
    for holder in (document, document.get("response"), document.get("message")):
        usage = cast("dict[str, Any]", holder).get("usage") if isinstance(holder, dict) else None
        if isinstance(usage, dict):
            counts = cast("dict[str, Any]", usage)
            given = count_of(counts.get("prompt_tokens"))
            if given is None and (given := count_of(counts.get("input_tokens"))) is not None:
                cached = (counts.get("cache_read_input_tokens"), counts.get("cache_creation_input_tokens"))
                given += sum(count_of(each) or 0 for each in cached)
            output = count_of(counts.get("completion_tokens"))
            return given, count_of(counts.get("output_tokens")) if output is None else output
    return None, None


def count_of(value: Any) -> int | None:
    """Return a number of tokens; None for what is none, or more than any model's context holds."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 10**7 else None


_MODEL = re.compile(rb'"model"(\s*:\s*)("(?:[^"\\]|\\.)*")')


class Renamed:
    """Gives an answer's model the name by which it was asked for; in a text, the quotes would be escaped."""

    __slots__ = ("_name", "_new", "_old")

    def __init__(self, name: bytes) -> None:
        """Take the name as JSON."""
        self._name = name
        self._old: bytes | None = None
        self._new = b""

    def of(self, piece: bytes) -> bytes:
        """Return a piece of an answer, which splits no event, with the name in place of the server's own."""
        if self._old is None:
            found = _MODEL.search(piece)
            if found is None:
                return piece
            before = b'"model"' + found[1]
            self._old, self._new = (b"", b"") if found[2] == self._name else (found[0], before + self._name)
        return piece.replace(self._old, self._new) if self._old else piece
