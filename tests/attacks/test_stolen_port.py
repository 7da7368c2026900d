"""On the ports of model servers, live: a job gets none of them, and who has one none of their requests.

Where a node cannot keep jobs from these ports, the job is the thief; else a process of another account of the host is.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from tests.integration.conftest import Installation
from tests.integration.test_pools_kept import Chat
from tests.support.servers import ROOT, fresh_database, scratch_folder, wait_until

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(os.geteuid() != 0, reason="a tenant's jobs have a user of their own where root starts them"),
]

PORTS = range(31_480, 31_500)
THIEF = r"""
import selectors, socket, sys, time
first, last = map(int, sys.argv[1].split("-"))
waiting = selectors.DefaultSelector()
for port in range(first, last + 1):
    try:
        server = socket.create_server(("", port))
    except OSError:
        continue
    waiting.register(server, selectors.EVENT_READ)
print("holds", len(waiting.get_map()), flush=True)
body = b'{"object": "list", "data": [], "choices": [], "usage": {"completion_tokens": 1}}'
while True:
    for key, _ in waiting.select():
        client, _ = key.fileobj.accept()
        client.settimeout(0.5)
        try:
            asked = client.recv(65536)
            print("STOLEN", asked, flush=True)
            client.sendall(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        except OSError:
            pass
        client.close()
"""
PROMPT = "a very secret prompt"


@pytest.fixture(scope="module")
def chat(postgres_url: str) -> Iterator[Chat]:
    database_url = fresh_database(postgres_url)
    with scratch_folder() as folder:
        made = Installation(
            *(folder / "data", "1x4@US-CAL-CISO,1x4@DE"),
            **{
                "DATABASE_URL": database_url,
                "CARBON_ZONES": "US-CAL-CISO,DE",
                "SERVING_INSTANCE_LOOK_S": "0.3",
                "SCHEDULER_MASTER_PORTS": f"[{PORTS[0]},{PORTS[-1]}]",
            },
        )
        made.up()
        yield Chat(made, database_url)
        made.down()


def test_a_job_on_the_ports_of_model_servers_gets_no_prompt(chat: Chat) -> None:
    gateway = chat.installation.gateway
    gateway.call("POST", "/v1/tenants", body={"id": "thieves"})
    made = gateway.call("POST", "/v1/keys", body={"tenant_id": "thieves", "role": "user"})
    command = [sys.executable, str(ROOT / "examples" / "pools" / "stand_in_server.py"), "--load-s", "8", "--model", "m"]
    spec = gateway.get("/v1/pools/chat")["spec"]
    spec["modes"][0]["command"] = command
    gateway.call("PUT", "/v1/pools/chat", body=spec | {"models": ["m"]})
    router = chat.installation.process("router")
    headers = {"authorization": f"Bearer {(chat.installation.folder / 'admin.key').read_text().strip()}"}
    with (
        contextlib.ExitStack() as leaving,
        httpx.Client(base_url=gateway.url, headers={"authorization": f"Bearer {made['secret']}"}, timeout=30) as thief,
        httpx.Client(base_url=f"http://127.0.0.1:{router.port}", headers=headers, timeout=30) as client,
    ):
        body = {"name": "thief", "command": ["/usr/bin/python3", "-c", THIEF, f"{PORTS[0]}-{PORTS[-1]}"]}
        job = thief.post("/v1/jobs", json=body).json()["id"]

        def of_job() -> str:
            return thief.get(f"/v1/jobs/{job}/logs", params={"stream": "both"}).text

        wait_until(lambda: "holds" in of_job(), 120)
        nodes = chat.installation.nodes()
        is_kept = all(each["holds"] for node in nodes for each in node["protections"] if each["name"] == "network")
        assert (int(of_job().partition("holds ")[2].split()[0]) <= 1) == is_kept, "but the one of its own gang"
        words = ["/usr/bin/python3", "-c", THIEF, f"{PORTS[0]}-{PORTS[-1]}"]
        said = leaving.enter_context((chat.installation.folder / "outsider").open("w+"))
        outsider = leaving.enter_context(subprocess.Popen(words, stdout=said, user=65_534, cwd="/"))
        leaving.callback(outsider.kill)

        def printed() -> str:
            return of_job() + (chat.installation.folder / "outsider").read_text()

        wait_until(lambda: printed().count("holds") == 2)
        chat.plan(west=1)
        states = set[str]()

        def was_found_out() -> bool:
            found = chat.instances("starting", "ready", "stopping", "ended")
            states.update(each["state"] for each in found)
            asked = {"model": "m", "messages": [{"role": "user", "content": PROMPT}]}
            with contextlib.suppress(httpx.TimeoutException):  # it is held for an instance that starts
                client.post("/v1/chat/completions", json=asked, timeout=2)
            return any(each["reason"] == "port_taken" for each in found)

        wait_until(was_found_out, 120)
        assert "ready" not in states
        assert "Bearer" not in printed()
        assert PROMPT not in printed()
        thief.post(f"/v1/jobs/{job}/cancel")
        outsider.kill()
        wait_until(lambda: chat.ready() == ["west"], 180)
        (ready,) = chat.instances("ready")
        assert (ready["listener"], ready["checks_key"]) == ("own", True)
        asked = {"model": "m", "messages": [{"role": "user", "content": PROMPT}]}
        wait_until(lambda: client.post("/v1/chat/completions", json=asked).status_code == 200)
        assert httpx.get(f"{ready['url']}/v1/models").status_code == 401
