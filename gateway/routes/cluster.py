"""Nodes, reports on what the cluster used and did, and policies."""

from __future__ import annotations

from gateway.routes.route import Route, Status, Upstream
from services.contracts import nodes, policies, predictions, queries, reports
from services.contracts.identity import Role

_NOT_POWERED = Status(
    409, "The node's state does not allow it: `conflict`; or no power hook covers the node: `capability_missing`."
)

NODES = (
    Route("GET", "/v1/nodes", Role.OPERATOR, Upstream.TELEMETRY, "nodes", "List nodes", answer=nodes.NodeList),
    Route("GET", "/v1/nodes/{node_id}", Role.OPERATOR, Upstream.TELEMETRY, "nodes", "Get a node", answer=nodes.Node),
    Route(
        "POST",
        "/v1/nodes/{node_id}/drain",
        Role.OPERATOR,
        Upstream.TELEMETRY,
        "nodes",
        "Drain a node",
        "Running jobs continue; nothing new starts on the node.",
        answer=nodes.Node,
    ),
    Route(
        "POST",
        "/v1/nodes/{node_id}/resume",
        Role.OPERATOR,
        Upstream.TELEMETRY,
        "nodes",
        "Return a drained node to service",
        answer=nodes.Node,
    ),
    Route(
        "POST",
        "/v1/nodes/{node_id}/sleep",
        Role.OPERATOR,
        Upstream.SCHEDULER,
        "nodes",
        "Power down an idle node",
        "A job that is planned on the node wakes it again.",
        answer=nodes.NodePower,
        statuses=(_NOT_POWERED,),
    ),
    Route(
        "POST",
        "/v1/nodes/{node_id}/wake",
        Role.OPERATOR,
        Upstream.SCHEDULER,
        "nodes",
        "Wake a node",
        answer=nodes.NodePower,
        statuses=(_NOT_POWERED,),
    ),
    Route(
        "POST",
        "/v1/nodes/{node_id}/pin-awake",
        Role.OPERATOR,
        Upstream.SCHEDULER,
        "nodes",
        "Keep a node awake",
        "The node is woken if it is off, and plans do not power it down until it is unpinned.",
        answer=nodes.NodePower,
    ),
    Route(
        "POST",
        "/v1/nodes/{node_id}/unpin",
        Role.OPERATOR,
        Upstream.SCHEDULER,
        "nodes",
        "Let plans power a node down again",
        answer=nodes.NodePower,
    ),
)

REPORTS = (
    Route(
        "GET",
        "/v1/reports/footprint",
        Role.USER,
        Upstream.TELEMETRY,
        "footprint",
        "Sum energy and emissions by job, project, tenant or node",
        "A user sees its tenant's jobs; an operator sees everything, idle energy included.",
        query=queries.FootprintQuery,
        answer=reports.FootprintReport,
    ),
    Route(
        "GET",
        "/v1/reports/history",
        Role.USER,
        Upstream.TELEMETRY,
        "jobs",
        "Export past jobs as they ran, to replay them",
        query=queries.PastJobsQuery,
        answer=reports.PastJobs,
    ),
    Route(
        "GET",
        "/v1/invariants",
        Role.OPERATOR,
        Upstream.TELEMETRY,
        "footprint",
        "Check that the live system is consistent",
        answer=reports.InvariantReport,
    ),
)

POLICIES = (
    Route(
        "GET",
        "/v1/policies",
        Role.USER,
        Upstream.SCHEDULER,
        "policies",
        "List policies",
        answer=policies.PolicyList,
    ),
    Route(
        "GET",
        "/v1/policies/active",
        Role.USER,
        Upstream.SCHEDULER,
        "policies",
        "Get the policy that is active",
        answer=policies.ActivePolicy,
    ),
    Route(
        "PUT",
        "/v1/policies/active",
        Role.OPERATOR,
        Upstream.SCHEDULER,
        "policies",
        "Choose the policy and its parameters",
        body=policies.PolicyChoice,
        answer=policies.ActivePolicy,
        statuses=(Status(409, "Another request changed the policy at the same time: `conflict`."),),
    ),
    Route(
        "GET",
        "/v1/predictions/models",
        Role.OPERATOR,
        Upstream.SCHEDULER,
        "policies",
        "List the versions of the job length model, with their errors",
        answer=predictions.LengthModelList,
    ),
    Route(
        "GET",
        "/v1/policies/{name}",
        Role.USER,
        Upstream.SCHEDULER,
        "policies",
        "Get a policy",
        answer=policies.PolicyDescription,
    ),
    Route(
        "GET",
        "/v1/plans",
        Role.OPERATOR,
        Upstream.SCHEDULER,
        "policies",
        "List scheduling rounds, newest first",
        query=queries.PlanQuery,
        answer=policies.PlanList,
    ),
    Route(
        "GET",
        "/v1/plans/{round_number}",
        Role.OPERATOR,
        Upstream.SCHEDULER,
        "policies",
        "Get a scheduling round",
        answer=policies.PlanSummary,
    ),
)
