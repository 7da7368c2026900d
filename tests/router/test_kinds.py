"""All of ``/v1`` passes: routed by its model, answered unchanged under the name that was asked for, and accounted."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from services.router.breaker import FAILURES
from services.router.forms import boundary_of, places
from services.router.kinds import OTHER, Renamed, kind_of
from services.router.openai import read
from tests.gateway.peer import a_peer
from tests.router.conftest import Stage
from tests.router.test_usage_of_streams import counted, usages
from tests.support.routers import MODEL, Running, a_key, a_routed_server

OWN = "served/llama"


def event(name: str, **more: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **more})}\n\n".encode()


RESPONSES = [
    event("response.created", response={"id": "r", "model": OWN, "usage": None, "error": None}),
    *(event("response.output_text.delta", delta=f'"model": "{OWN}" ') for _ in range(3)),
    event("response.completed", response={"model": OWN, "usage": {"input_tokens": 41, "output_tokens": 17}}),
]
MESSAGES = [
    event("message_start", message={"model": OWN, "usage": {"input_tokens": 30, "cache_read_input_tokens": 11}}),
    *(event("content_block_delta", delta={"type": "text_delta", "text": "hi"}) for _ in range(3)),
    event("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 17}),
    event("message_stop"),
]
CUT = {
    "/v1/responses": ("error", lambda said: said["code"] == "upstream_broke_off"),
    "/v1/messages": ("error", lambda said: set(said["error"]) == {"type", "message"}),
}


class Server:
    """Answers with what it is given, and keeps what it is asked."""

    def __init__(self, body: bytes | list[bytes], content_type: str = "application/json") -> None:
        self.body, self.content_type, self.breaks_off = body, content_type, False
        self.asked: list[tuple[str, dict[str, str], bytes]] = []

    def says(self, document: Any) -> None:
        self.body, self.content_type = json.dumps(document).encode(), "application/json"

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            return web.Response()
        self.asked.append((request.path_qs, dict(request.headers), await request.read()))
        headers = {"content-type": self.content_type}
        if isinstance(self.body, bytes):
            return web.Response(body=self.body, headers=headers)
        answer = web.StreamResponse(headers=headers)
        await answer.prepare(request)
        for piece in self.body:
            await answer.write(piece)
        if self.breaks_off and request.transport is not None:
            request.transport.abort()
        return answer


async def asked_of(server: Server, router: Running, stage: Stage, path: str, **options: Any) -> httpx.Response:
    async with a_peer(server.answer) as url:
        stage.plane.servers = [a_routed_server(stage.one, url=url, upstream_model=OWN)]
        await router.adopted()
        return await router.http.post(path, **options)


@pytest.mark.parametrize(
    ("path", "usage"),
    [
        ("/v1/responses", {"input_tokens": 41, "output_tokens": 17}),
        ("/v1/messages", {"input_tokens": 30, "cache_read_input_tokens": 11, "output_tokens": 17}),
        ("/v1/chat/completions", {"prompt_tokens": 41, "completion_tokens": 17}),
    ],
)
async def test_a_whole_answer_counts_as_its_api_states_it_under_the_name_that_was_asked_for(
    router: Running, stage: Stage, path: str, usage: dict[str, int]
) -> None:
    text = f'say "model": "{OWN}"'
    server = Server(json.dumps({"model": OWN, "output": text, "usage": usage}).encode())
    answer = await asked_of(server, router, stage, path, json={"model": MODEL, "input": "Hello", "temperature": 0})

    assert answer.json() == {"model": MODEL, "output": text, "usage": usage}
    assert json.loads(server.asked[0][2]) == {"model": OWN, "input": "Hello", "temperature": 0}
    assert counted(await usages(router, stage)) == (1, 41, 17, 0)


@pytest.mark.parametrize(("path", "events"), [("/v1/responses", RESPONSES), ("/v1/messages", MESSAGES)])
async def test_a_stream_of_either_api_passes_and_counts_as_it_states(
    router: Running, stage: Stage, path: str, events: list[bytes]
) -> None:
    server = Server(events, "text/event-stream")
    answer = await asked_of(server, router, stage, f"{path}?beta=true", json={"model": MODEL, "stream": True})

    given_back = b"".join(events).replace(json.dumps(OWN).encode(), json.dumps(MODEL).encode()).decode()
    passed, _, comment = answer.text.rpartition(": x-wattshift-")
    assert passed.partition(": x-wattshift")[0] == given_back
    assert "location=here" in comment
    assert server.asked[0][0] == f"{path}?beta=true"
    assert b"stream_options" not in server.asked[0][2]
    assert counted(await usages(router, stage)) == (1, 41, 17, 0)


@pytest.mark.parametrize(("path", "events"), [("/v1/responses", RESPONSES), ("/v1/messages", MESSAGES)])
async def test_a_stream_that_breaks_off_ends_with_an_error_of_its_api(
    router: Running, stage: Stage, path: str, events: list[bytes]
) -> None:
    server = Server(events[:3], "text/event-stream")
    server.breaks_off = True
    answer = await asked_of(server, router, stage, path, json={"model": MODEL, "stream": True})

    last = answer.text.rstrip().split("\n\n")[-1]
    name, is_right = CUT[path]
    assert last.startswith(f"event: {name}\ndata: ")
    said = json.loads(last.partition("data: ")[2])
    assert said["type"] == name
    assert is_right(said)
    assert {labels[2] for labels in router.router.metrics.requests.values} == {"502"}


async def test_a_form_is_routed_by_its_model_and_its_file_passes(router: Running, stage: Stage) -> None:
    sound = bytes(range(256)) * 300
    server = Server(b"1\n00:00 --> 00:01\nhello", "text/plain")
    answer = await asked_of(
        server,
        router,
        stage,
        "/v1/audio/transcriptions",
        data={"model": MODEL, "response_format": "srt"},
        files={"file": ("a.wav", sound, "audio/wav")},
    )

    assert answer.text == "1\n00:00 --> 00:01\nhello"
    _, headers, body = server.asked[0]
    boundary = boundary_of(headers["Content-Type"].encode())
    assert boundary is not None
    found = {name: body[begin:end] for name, (begin, end) in places(body, boundary).items()}
    assert found == {"model": OWN.encode(), "response_format": b"srt"}
    assert sound in body


@pytest.mark.parametrize("breaks_off", [False, True])
async def test_an_answer_of_bytes_passes_as_it_comes_and_never_seems_whole_if_it_is_not(
    router: Running, stage: Stage, breaks_off: bool
) -> None:
    server = Server([b"ID3", b"\x00" * 1_000], "audio/mpeg")
    server.breaks_off = breaks_off
    asking = asked_of(server, router, stage, "/v1/audio/speech", json={"model": MODEL, "input": "Hello"})
    if breaks_off:
        with pytest.raises(httpx.RemoteProtocolError):
            await asking
    else:
        answer = await asking
        assert (answer.content, answer.headers["content-type"]) == (b"ID3" + b"\x00" * 1_000, "audio/mpeg")


@pytest.mark.parametrize("path", ["/v1/rerank", "/tokenize", "/v1/score", "/v1/moderations", "/v1/some/new-thing"])
async def test_other_endpoints_are_routed_by_their_model(router: Running, stage: Stage, path: str) -> None:
    server = Server(b'[{"index": 0, "score": 0.5}]')
    answer = await asked_of(server, router, stage, path, json={"model": MODEL, "query": "a", "documents": ["b"]})

    assert answer.json() == [{"index": 0, "score": 0.5}]
    assert server.asked[0][0] == path
    assert {labels[2] for labels in router.router.metrics.requests.values} == {"200"}


@pytest.mark.parametrize(
    "path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/models/load", "/v1/a/%2e%2e/b", "/v1/x%0d%0ay"]
)
async def test_what_administers_servers_does_not_reach_them(router: Running, stage: Stage, path: str) -> None:
    server = Server(b"{}")
    answer = await asked_of(server, router, stage, path, json={"model": MODEL})
    assert answer.status_code in (404, 405)
    assert server.asked == []


async def test_messages_are_asked_and_refused_as_their_client_does_it(router: Running, stage: Stage) -> None:
    server = Server(b'{"type":"message"}')
    headers = {"x-api-key": a_key(), "anthropic-version": "2023-06-01"}
    async with a_peer(server.answer) as url, httpx.AsyncClient(base_url=router.url, headers=headers) as http:
        stage.plane.servers = [a_routed_server(stage.one, url=url)]
        await router.adopted()
        body = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "Hello"}]}
        assert (await http.post("/v1/messages", json=body)).status_code == 200
        unknown = await http.post("/v1/messages", json={**body, "model": "nobody"})
        no_key = await http.post("/v1/messages", json=body, headers={"x-api-key": "wrong"})

    assert server.asked[0][1]["anthropic-version"] == "2023-06-01"
    assert "x-api-key" not in {name.lower() for name in server.asked[0][1]}
    said = [(each.status_code, each.json()["type"], each.json()["error"]["type"]) for each in (unknown, no_key)]
    assert said == [(404, "error", "not_found_error"), (401, "error", "authentication_error")]


async def test_an_unknown_endpoint_is_not_asked_twice(router: Running, stage: Stage) -> None:
    assert kind_of("/v1/some/new-thing") is OTHER
    assert not read(b'{"model": "a"}', may_repeat=OTHER.may_repeat).may_repeat
    assert read(b'{"model": "a"}').may_repeat


@given(
    st.dictionaries(st.sampled_from(["model", "prompt", "n"]), st.text(), min_size=1),
    st.binary(max_size=300),
    st.text(),
)
def test_a_forms_fields_are_read_as_they_were_written_and_only_the_model_changes(
    fields: dict[str, str], file: bytes, model: str
) -> None:
    mark = "b0undary" + "x" * 20
    parts = [
        f'--{mark}\r\nContent-Disposition: form-data; name="{n}"\r\n\r\n{v}\r\n'.encode() for n, v in fields.items()
    ]
    head = f'--{mark}\r\nContent-Disposition: form-data; name="file"; filename="model"\r\n\r\n'.encode()
    body = b"".join(parts) + head + file + f"\r\n--{mark}--\r\n".encode()
    found = places(body, mark.encode())
    assert {name: body[begin:end].decode() for name, (begin, end) in found.items()} == fields
    if fields.get("model") and len(fields["model"]) <= 200:
        changed = read(body, mark.encode()).with_fields(model=model)
        after = {name: changed[begin:end].decode() for name, (begin, end) in places(changed, mark.encode()).items()}
        assert after == {**fields, "model": model}
        assert file in changed


@pytest.mark.parametrize("body", [b"", b"--b", b"--b\r\n\r\nx", b'--b\r\nContent-Disposition: form-data; name="model"'])
def test_what_is_no_form_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="form"):
        places(body, b"b")


def test_two_models_are_refused() -> None:
    part = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\na\r\n'
    with pytest.raises(ValueError, match="twice"):
        places(part + part + b"--b--", b"b")


@given(st.text(), st.text())
def test_only_the_models_name_changes(own: str, text: str) -> None:
    said = {"choices": [{"text": text}], "model": own, "n": 1}
    renamed = Renamed(b'"asked"')
    assert json.loads(renamed.of(json.dumps(said).encode())) == {**said, "model": "asked"}
    assert json.loads(renamed.of(json.dumps(said).encode())) == {**said, "model": "asked"}


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/chat/completions", b'data: {"error": {"message": "out of memory"}}\n\n'),
        ("/v1/messages", event("error", error={"type": "overloaded_error", "message": "full"})),
        ("/v1/responses", event("response.failed", response={"error": {"code": "server_error", "message": "full"}})),
    ],
)
async def test_an_error_within_a_stream_counts_against_its_server(
    router: Running, stage: Stage, path: str, said: bytes
) -> None:
    server = Server([said], "text/event-stream")
    async with a_peer(server.answer) as url:
        stage.plane.servers = [a_routed_server(stage.one, url=url)]
        await router.adopted()
        breaker = router.router.fleet.servers["instance_1"].breaker
        for failures in range(1, FAILURES):
            await router.ask(path, json={"model": MODEL, "stream": True})
            assert breaker.failures == failures
        await router.ask(path, json={"model": MODEL, "stream": True})
        assert breaker.opened_s is not None
