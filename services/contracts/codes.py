"""The stable codes of errors."""

from enum import StrEnum


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

MEANINGS: dict[str, tuple[str, str]] = {
    ProblemCode.BODY_NOT_JSON: ("The body is not JSON.", "Send JSON, in UTF-8, as `application/json`."),
    ProblemCode.BODY_TOO_LARGE: (
        "The body is larger than this operation takes.",
        "Send less at once: a batch in parts, files with an upload.",
    ),
    ProblemCode.CAPABILITY_MISSING: (
        "The hardware cannot do that, such as cutting a GPU without MIG.",
        "Look at the node's devices for what they can do, or choose another node.",
    ),
    ProblemCode.CONFLICT: (
        "What is there already, or what happens meanwhile, does not go together with the request.",
        "Read the present state again and decide anew. With `If-Match`, send the newest `ETag`.",
    ),
    ProblemCode.FORBIDDEN: (
        "The key is valid, and its role, tenant or project may not do this.",
        "Use a key of the role that the operation's description names.",
    ),
    ProblemCode.GANG_IMPOSSIBLE: (
        "No set of this cluster's GPUs can ever hold the job, however long it waits.",
        "Ask for fewer GPUs, another model or less memory; `detail` says what there is.",
    ),
    ProblemCode.IDEMPOTENCY_KEY_REUSED: (
        "The `Idempotency-Key` was used before, for a request with another body.",
        "Use a new key for each thing that you submit, and the same one only to repeat it.",
    ),
    ProblemCode.INTERNAL: (
        "An error of ours. Whether the request took effect is not known.",
        "Look before you repeat it; an operator finds the `request_id` in the logs.",
    ),
    ProblemCode.INVALID_CURSOR: (
        "The cursor was not made by this list, or by these filters.",
        "Begin again without one, and pass on each `next_cursor` as it is.",
    ),
    ProblemCode.INVALID_POLICY_PARAMETERS: (
        "The policy has no such parameter, or not with this value.",
        "`GET /v1/policies` gives the parameters of each policy with their ranges.",
    ),
    ProblemCode.INVALID_REQUEST: (
        "A field, parameter or header is missing, unknown, or has a value that is not allowed.",
        "`errors` points at each of them and says what is allowed.",
    ),
    ProblemCode.INVALID_TRANSITION: (
        "What the request asks for cannot be done in the present state, such as releasing a job that has ended.",
        "Read the state again; the job may have gone on meanwhile.",
    ),
    ProblemCode.METHOD_NOT_ALLOWED: ("The path does not know this method.", "The header `Allow` names those it knows."),
    ProblemCode.NO_DATA: (
        "There is nothing for the period or zone that was asked for.",
        "Ask for another period; `/v1/carbon/zones` lists zones.",
    ),
    ProblemCode.NO_FORECAST: (
        "There is no forecast that reaches as far ahead as was asked for.",
        "Ask for less ahead, or name a provider with forecasts in the settings of the carbon service.",
    ),
    ProblemCode.NOT_FOUND: (
        "There is no such thing, or the key may not see it: both are answered alike.",
        "Check the id, and whether the key is of the right tenant and project.",
    ),
    ProblemCode.QUOTA_EXCEEDED: (
        "The tenant has as many active jobs as it may.",
        "Wait until jobs have ended, cancel some, or ask an admin for another limit. Repeating at once does not help.",
    ),
    ProblemCode.RATE_LIMITED: (
        "More requests came than the tenant or address may send.",
        "Wait as long as `Retry-After` says. `RateLimit` tells how many are left.",
    ),
    ProblemCode.UNAUTHENTICATED: (
        "No key came with the request, or one that is unknown, revoked or expired.",
        "Send `Authorization: Bearer KEY`; `wattshift keys create` makes one.",
    ),
    ProblemCode.UNAVAILABLE: (
        "A service or the database does not answer, or too many requests wait already.",
        "Repeat it after `Retry-After`: that is safe for GET, PUT and DELETE, and with an `Idempotency-Key`.",
    ),
    ProblemCode.UNKNOWN_POLICY: ("There is no policy of that name here.", "`GET /v1/policies` lists those there are."),
    ProblemCode.UNKNOWN_ZONE: (
        "No provider here knows that zone of the grid.",
        "`GET /v1/carbon/zones` lists those that are known; further ones need a provider.",
    ),
    ProblemCode.UNSUPPORTED_MEDIA_TYPE: (
        "The `Content-Type` is not one that this operation reads.",
        "Its description names those it reads, most often `application/json`.",
    ),
    "queue_full": (
        "As many requests wait for the application as may.",
        "Repeat it after `Retry-After`, or ask for more instances of the application.",
    ),
    "no_instance": (
        "No instance of the application is ready.",
        "Repeat it after `Retry-After`: one may be starting. `wattshift apps` shows which are.",
    ),
    "upstream_timeout": ("The instance did not answer in time.", "Repeat it if the request may be computed twice."),
    "upstream_busy": ("All connections to the instances are in use.", "Repeat it after `Retry-After`."),
    "upstream_failed": (
        "The instance broke off, or what it answered is no answer.",
        "Repeat it if the request may be computed twice; the logs of the instance's job say why.",
    ),
    "unknown_url": ("The router has no such path.", "The application's page lists the paths that it answers."),
}
"""What each code means, and what its receiver can do; the last ones are the router's, to requests to applications."""
