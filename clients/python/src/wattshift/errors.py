"""What the client raises."""

from __future__ import annotations

from dataclasses import dataclass


class WattshiftError(Exception):
    """Anything that went wrong between this program and the control plane."""


@dataclass(frozen=True)
class FieldError:
    """One error in a request.

    Attributes:
        pointer: JSON pointer into the body (``/gpus/min``), ``?name`` for a query parameter, ``#name`` for a header.
        detail: What is wrong with it.
    """

    pointer: str
    detail: str


class ApiError(WattshiftError):
    """The control plane refused a request.

    Attributes:
        status: The HTTP status.
        code: Stable code to branch on, such as ``quota_exceeded``; empty if the answer came from something
            other than the control plane, such as a proxy.
        detail: What is wrong, in one sentence.
        errors: The fields at fault.
        request_id: Identifies the request in the control plane's logs; None if it is not known.
    """

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        errors: tuple[FieldError, ...] = (),
        request_id: str | None = None,
    ) -> None:
        fields = "".join(f"\n  {each.pointer or '/'}: {each.detail}" for each in errors if each.detail not in detail)
        super().__init__((f"{detail} ({code})" if code else detail) + fields)
        self.status = status
        self.code = code
        self.detail = detail
        self.errors = errors
        self.request_id = request_id


class UnreachableError(WattshiftError):
    """The control plane does not answer, or its answer broke off."""
