"""What must still hold after all that `gate.py`, `services.py` and `operations.py` have asked."""

from __future__ import annotations

from gateway.routes import read_routes
from tests.fuzz.asking import FOLLOWED, WITHIN_S, ask
from tests.fuzz.world import World


def test_the_installation_stands(world: World) -> None:
    """Every process is ready, everything that was stored can be read, and the job runs.

    But if the admin was fuzzed into revoking the node: such a node is let in no more, and the job waits for another.
    """
    nodes = world.session.get(f"{world.stack.gateway_url}/v1/nodes", headers=world.admin, timeout=WITHIN_S).json()
    is_revoked = not any(
        each["id"] == world.ids["node_id"] and each["credential"] != "revoked" for each in nodes["items"]
    )
    for service, url in world.urls.items():
        if service == "agent" and is_revoked:
            continue
        answer = world.session.get(f"{url}/readyz", timeout=WITHIN_S)
        assert answer.status_code == 200, (service, answer.text)
    for route in read_routes():
        if route.method == "GET" and "{" not in route.path:
            url = world.stack.gateway_url + route.path
            sent = {"method": "GET", "url": url, "params": {"follow": "false"} if route.path in FOLLOWED else {}}
            assert ask(world.session, sent, world.admin).status_code < 500, route.path
    job = world.session.get(
        f"{world.stack.gateway_url}/v1/jobs/{world.ids['job_id']}", headers=world.admin, timeout=WITHIN_S
    )
    assert job.json()["state"] in (("running", "queued") if is_revoked else ("running",))
    found = world.session.get(f"{world.stack.gateway_url}/v1/invariants", headers=world.admin, timeout=WITHIN_S).json()
    assert found["holds"], found
