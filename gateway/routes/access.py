"""Tenants, keys and the audit log."""

from __future__ import annotations

from gateway.routes.route import Route, Status, Upstream
from services.contracts import identity, queries
from services.contracts.identity import Role

ACCESS = (
    Route(
        "POST",
        "/v1/tenants",
        Role.ADMIN,
        Upstream.ADMISSION,
        "access",
        "Create a tenant",
        body=identity.TenantSpec,
        answer=identity.Tenant,
        status=201,
        statuses=(Status(409, "A tenant with this id exists: `conflict`."),),
    ),
    Route(
        "GET",
        "/v1/tenants",
        Role.OPERATOR,
        Upstream.ADMISSION,
        "access",
        "List tenants",
        query=queries.PageQuery,
        answer=identity.TenantList,
    ),
    Route(
        "GET",
        "/v1/tenants/{tenant_id}",
        Role.OPERATOR,
        Upstream.ADMISSION,
        "access",
        "Get a tenant",
        answer=identity.Tenant,
    ),
    Route(
        "PATCH",
        "/v1/tenants/{tenant_id}",
        Role.ADMIN,
        Upstream.ADMISSION,
        "access",
        "Change a tenant's limits",
        body=identity.TenantChange,
        answer=identity.Tenant,
    ),
    Route(
        "POST",
        "/v1/keys",
        Role.ADMIN,
        Upstream.ADMISSION,
        "access",
        "Create an API key",
        "Only this answer contains the secret.",
        body=identity.KeySpec,
        answer=identity.NewApiKey,
        status=201,
    ),
    Route(
        "GET",
        "/v1/keys",
        Role.ADMIN,
        Upstream.ADMISSION,
        "access",
        "List API keys",
        query=queries.PageQuery,
        answer=identity.KeyList,
    ),
    Route(
        "DELETE",
        "/v1/keys/{key_id}",
        Role.ADMIN,
        Upstream.ADMISSION,
        "access",
        "Revoke an API key",
        status=204,
        statuses=(Status(409, "It is the last admin key: `conflict`."),),
    ),
    Route(
        "GET",
        "/v1/audit",
        Role.OPERATOR,
        Upstream.ADMISSION,
        "access",
        "List what operators and admins did, newest first",
        query=queries.PageQuery,
        answer=identity.AuditList,
    ),
)
