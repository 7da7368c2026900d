"""The stable codes of errors."""

import json
from enum import StrEnum
from pathlib import Path


class ProblemCode(StrEnum):
    """Stable codes for clients to branch on. New ones may be added; existing ones are never renamed."""

    BODY_NOT_JSON = "body_not_json"
    BODY_TOO_LARGE = "body_too_large"
    CAPABILITY_MISSING = "capability_missing"
    CONFLICT = "conflict"
    FORBIDDEN = "forbidden"
    GANG_IMPOSSIBLE = "gang_impossible"
    IDEMPOTENCY_KEY_REUSED = "idempotency_key_reused"
    INTERNAL = "internal"
    INVALID_CURSOR = "invalid_cursor"
    INVALID_POLICY_PARAMETERS = "invalid_policy_parameters"
    INVALID_REQUEST = "invalid_request"
    INVALID_TRANSITION = "invalid_transition"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    NO_DATA = "no_data"
    NO_FORECAST = "no_forecast"
    NOT_FOUND = "not_found"
    QUOTA_EXCEEDED = "quota_exceeded"
    RATE_LIMITED = "rate_limited"
    UNAUTHENTICATED = "unauthenticated"
    UNAVAILABLE = "unavailable"
    UNKNOWN_POLICY = "unknown_policy"
    UNKNOWN_ZONE = "unknown_zone"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"


PROBLEMS = "/problems"  #: Where the public API has a page for each code, to which the `type` of a problem leads

MEANINGS: dict[str, tuple[str, str]] = json.loads(Path(__file__).with_name("codes.json").read_bytes())
"""What each code means, and what its receiver can do; the last ones are the router's, to requests to applications."""
