"""Commands beside jobs, by way of a node that answers as agents do; tests/integration/test_exec.py has real ones."""

import asyncio

import pytest
from aiohttp import web

from services.contracts.exec_sessions import ExecInput, ExecRequest
from services.contracts.identity import Identity, Role
from services.kit.problems import ProblemError
from tests.admission.installation import Admission
from tests.support.ports import Ports


async def test_a_key_has_no_more_sessions_than_it_may_however_fast_it_asks(admission: Admission) -> None:
    async def begin(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await asyncio.sleep(60)
        return answer

    app, ports = web.Application(), Ports()
    app.router.add_post("/v1/allocations/{allocation_id}/exec/{session_id}", begin)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    port = ports.take(28_600)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await admission.add_node("exec-1", "A100", "A100", agent_url=f"http://127.0.0.1:{port}")
    job_id = await admission.submit()
    await admission.start(job_id, node="exec-1")
    sessions = admission.app.state.exec_sessions
    caller = Identity(tenant_id="default", role=Role.USER, key_id="key_in_a_hurry")
    asked = (sessions.run(caller, job_id, ExecRequest(command=["true"])) for _ in range(25))
    found = await asyncio.gather(*asked, return_exceptions=True)
    refused = [each for each in found if isinstance(each, ProblemError)]
    assert [each.status for each in refused] == [429] * 5
    for each in found:
        if each not in refused:
            await each.aclose()
    await _take_down(admission, runner, ports)


async def test_a_node_that_answers_input_with_anything_else_does_not_answer(admission: Admission) -> None:
    async def take(request: web.Request) -> web.Response:
        return web.Response(text="<html>a proxy's page</html>")

    app, ports = web.Application(), Ports()
    app.router.add_put("/v1/exec/{session_id}", take)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    port = ports.take(28_600)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await admission.add_node("exec-2", "A100", agent_url=f"http://127.0.0.1:{port}")
    job_id = await admission.submit()
    await admission.start(job_id, node="exec-2")
    caller = Identity(tenant_id="default", role=Role.USER, key_id="key_that_types")
    session = f"exec_1_0_{'0' * 32}"
    with pytest.raises(ProblemError) as caught:
        await admission.app.state.exec_sessions.send(caller, job_id, session, ExecInput(offset=0, data="eA=="))
    assert caught.value.status == 503
    await _take_down(admission, runner, ports)


async def _take_down(admission: Admission, runner: web.AppRunner, ports: Ports) -> None:
    await admission.database.execute("DELETE FROM nodes")
    await runner.cleanup()
    ports.release()
