"""What jobs are given beside their spec: secrets, and archives of their files."""

from __future__ import annotations

from gateway.routes.route import Route, Status, Upstream
from services.contracts import queries, secrets, sources
from services.contracts.identity import Role

INPUTS = (
    Route(
        "PUT",
        "/v1/secrets/{name}",
        Role.USER,
        Upstream.ADMISSION,
        "inputs",
        "Set a secret of the tenant",
        "Jobs that name it get its value. No answer ever contains it.",
        operation="set_secret",
        body=secrets.SecretSpec,
        answer=secrets.Secret,
        statuses=(Status(409, "The installation has no key to seal secrets with: `capability_missing`."),),
    ),
    Route(
        "GET",
        "/v1/secrets",
        Role.USER,
        Upstream.ADMISSION,
        "inputs",
        "List the secrets of the tenant, without their values",
        operation="list_secrets",
        answer=secrets.SecretList,
    ),
    Route(
        "DELETE",
        "/v1/secrets/{name}",
        Role.USER,
        Upstream.ADMISSION,
        "inputs",
        "Delete a secret",
        "Jobs that run keep its value; jobs that are yet to start with it fail.",
        operation="delete_secret",
        query=queries.SecretQuery,
        status=204,
    ),
    Route(
        "PUT",
        "/v1/uploads/{sha256}",
        Role.USER,
        Upstream.ADMISSION,
        "inputs",
        "Begin or continue an upload",
        "The archive is named by its SHA-256. What the tenant has uploaded before is not sent again.",
        operation="start_upload",
        for_projects=True,
        body=sources.UploadSpec,
        answer=sources.Upload,
        statuses=(
            Status(409, "It was begun with another size: `conflict`."),
            Status(413, "It is larger than an archive may be: `body_too_large`."),
        ),
    ),
    Route(
        "GET",
        "/v1/uploads/{sha256}",
        Role.USER,
        Upstream.ADMISSION,
        "inputs",
        "Get which part of an upload is there",
        operation="get_upload",
        for_projects=True,
        answer=sources.Upload,
    ),
    Route(
        "PUT",
        "/v1/uploads/{sha256}/chunks/{number}",
        Role.USER,
        Upstream.ADMISSION,
        "inputs",
        "Send a part of an upload",
        "With the last one, the whole is compared with its SHA-256; if they differ, all of it has to be sent again.",
        operation="send_upload_chunk",
        for_projects=True,
        body=sources.UploadChunk,
        answer=sources.Upload,
    ),
)
