"""Which operation a path names, and which paths name none."""

import pytest

from services.kit.edge.edge import Matcher

MATCHER = Matcher(
    [
        ("GET", "/v1/jobs", "list"),
        ("POST", "/v1/jobs", "submit"),
        ("POST", "/v1/jobs:batch", "batch"),
        ("GET", "/v1/jobs/{job_id}", "get"),
        ("POST", "/v1/jobs/{job_id}/cancel", "cancel"),
        ("GET", "/v1/carbon/zones", "zones"),
        ("GET", "/v1/carbon/{zone}/current", "current"),
        ("GET", "/v1/policies/active", "active"),
        ("GET", "/v1/policies/{name}", "policy"),
    ]
)


@pytest.mark.parametrize(
    ("sent", "methods", "path"),
    [
        ("/v1/jobs", {"GET": "list", "POST": "submit"}, "/v1/jobs"),
        ("/v1/jobs:batch", {"POST": "batch"}, "/v1/jobs:batch"),
        ("/v1/jobs%3Abatch", {"POST": "batch"}, "/v1/jobs:batch"),
        ("/%76%31/jobs", {"GET": "list", "POST": "submit"}, "/v1/jobs"),
        ("/v1/jobs/a-b_c.d~e:f", {"GET": "get"}, "/v1/jobs/a-b_c.d~e:f"),
        ("/v1/jobs/x/cancel", {"POST": "cancel"}, "/v1/jobs/x/cancel"),
        ("/v1/carbon/zones", {"GET": "zones"}, "/v1/carbon/zones"),
        ("/v1/carbon/zones/current", {"GET": "current"}, "/v1/carbon/zones/current"),
        ("/v1/policies/active", {"GET": "active"}, "/v1/policies/active"),
        ("/v1/policies/fifo", {"GET": "policy"}, "/v1/policies/fifo"),
    ],
)
def test_a_path_names_its_operations(sent: str, methods: dict[str, str], path: str) -> None:
    match = MATCHER.match(sent.encode())
    assert match is not None
    assert (match.methods, match.path) == (methods, path)


@pytest.mark.parametrize(
    "sent",
    [
        *("", "/", "v1/jobs", "/v1", "/v1/", "/v1/jobs/", "//v1/jobs", "/v1//jobs", "/v1/jobs/x/", "/V1/jobs"),
        *("/v1/jobs/.", "/v1/jobs/..", "/v1/jobs/%2e%2e", "/v1/jobs/../nodes", "/v1/jobs/%2E%2E/cancel"),
        *("/v1/jobs/a%00b", "/v1/jobs/%00", "/v1/jobs/a%2Fcancel", "/v1/jobs/a%2fb", "/v1/jobs/a%5Cb", "/v1/jobs/a%"),
        *("/v1/jobs/a%0d%0ab", "/v1/jobs/a%20b", "/v1/jobs/%C3%BC", "/v1/jobs/%FF", "/v1/jobs/a;b", "/v1/jobs/a?b"),
        *("/v1/jobs/%252e", f"/v1/jobs/{'x' * 256}", "/v1/jobs/@x", "/v1/jobs%2Fx", "*", "http://x/v1/jobs"),
    ],
)
def test_a_trick_names_nothing(sent: str) -> None:
    assert MATCHER.match(sent.encode()) is None
