"""What jobs are given beside their spec: secrets."""

from __future__ import annotations

from gateway.routes.route import Route, Status, Upstream
from services.contracts import queries, secrets
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
)
