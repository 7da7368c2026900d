"""A gateway of Kubernetes' Gateway API, as far as an endpoint picker sees it: Envoy's external processing.

It sends what Envoy sends with the modes that Gateway API's inference extension asks for, and does what it is told: it
carries requests to the servers that it is told, and answers by the replies. What Envoy would refuse, it refuses.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import httpx

from services.router.picking.protocol import DESTINATION, FULL_DUPLEX, METHOD, SERVICE, SUBSET, Reply, Said

PIECE_BYTES = 16_384


@dataclass
class Answer:
    """What the gateway's client got."""

    status: int
    headers: dict[str, str]
    content: bytes = b""
    is_of_picker: bool = False  #: Whether no server was asked
    server: str = ""  #: Where it was sent
    metadata: str = ""  #: Where the reply's dynamic metadata say
    seen: dict[str, str] = field(default_factory=dict[str, str])  #: Headers with which it was sent
    body: bytes = b""  #: As it was sent


class GatewayError(Exception):
    """The picker said what Envoy takes for no reply to what it was told."""


class Gateway:
    """Carries requests as the picker says."""

    def __init__(self, channel: grpc.aio.Channel, http: httpx.AsyncClient) -> None:
        self._process: Any = channel.stream_stream(
            f"/{SERVICE}/{METHOD}", request_serializer=Said.SerializeToString, response_deserializer=Reply.FromString
        )
        self._http = http

    async def ask(
        self,
        content: bytes,
        headers: dict[str, str],
        *,
        path: str = "/v1/chat/completions",
        method: str = "POST",
        subset: Sequence[str] | None = None,
        mode: int = FULL_DUPLEX,
        has_trailers: bool = False,
    ) -> Answer:
        call = self._process()
        said = Said()
        pseudo = {":method": method, ":path": path, ":authority": "models.example.org", ":scheme": "https"}
        for name, value in (pseudo | headers).items():
            said.request_headers.headers.headers.add(key=name, raw_value=value.encode())
        said.request_headers.end_of_stream = not content and not has_trailers
        said.protocol_config.request_body_mode = said.protocol_config.response_body_mode = mode
        if subset is not None:
            hint = said.metadata_context.filter_metadata["envoy.lb.subset_hint"]
            hint.fields[SUBSET].list_value.extend(subset)
        try:
            return await self._talk(call, said, content, headers, path, has_trailers)
        finally:
            call.cancel()

    async def _talk(
        self, call: Any, said: Any, content: bytes, headers: dict[str, str], path: str, has_trailers: bool
    ) -> Answer:
        await call.write(said)
        reading = asyncio.create_task(call.read())
        is_cut = False
        try:
            if not said.request_headers.end_of_stream:
                await _send_body(call, content, has_trailers, reading)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            is_cut = True  # an answer at once has ended the stream, while more of the body was on its way
        reply = await reading
        if reply is grpc.aio.EOF:
            raise GatewayError(f"The stream ended: {await call.code()}")
        if reply.WhichOneof("response") == "immediate_response":
            answer = _immediate(reply)
            if is_cut:
                return answer
        else:
            answer = await self._carry(call, reply, headers, path, has_trailers)
        await call.done_writing()
        if await call.read() is not grpc.aio.EOF:
            raise GatewayError("A reply came after the end of the answer.")
        return answer

    async def _carry(self, call: Any, reply: Any, headers: dict[str, str], path: str, has_trailers: bool) -> Answer:
        if reply.WhichOneof("response") != "request_headers":
            raise GatewayError("The first reply must be that to the request's headers.")
        sent = _changed(headers, reply.request_headers.response.header_mutation)
        place = reply.dynamic_metadata.fields["envoy.lb"].struct_value.fields[DESTINATION].string_value
        body = await self._body(call, "request_body", "request_trailers" if has_trailers else "")
        server = sent.pop(DESTINATION)
        if int(sent["content-length"]) != len(body):
            raise GatewayError("The request's length is not that of its body.")
        answer = Answer(0, {}, server=server, metadata=place, seen=sent, body=body)
        async with self._http.stream("POST", f"http://{server}{path}", headers=sent, content=body) as given:
            begun = Said()
            for name, value in ((":status", str(given.status_code)), *given.headers.items()):
                begun.response_headers.headers.headers.add(key=name, raw_value=value.encode())
            await call.write(begun)
            handing = asyncio.create_task(_hand_over(call, given))
            reading = asyncio.create_task(self._answer(call, answer, given.headers))
            try:
                await asyncio.wait((handing, reading), return_when=asyncio.FIRST_EXCEPTION)
                for each in (handing, reading):
                    if each.done():
                        each.result()
            finally:
                for each in (handing, reading):
                    each.cancel()
        return answer

    async def _answer(self, call: Any, answer: Answer, headers: httpx.Headers) -> None:
        if await self._begin(call, answer, headers):
            answer.content += await self._body(call, "response_body")

    async def _begin(self, call: Any, answer: Answer, headers: httpx.Headers) -> bool:
        reply = await call.read()
        if reply is grpc.aio.EOF:
            raise GatewayError("The stream ended before the answer began.")
        if reply.WhichOneof("response") == "immediate_response":
            found = _immediate(reply)
            answer.status, answer.headers, answer.content = found.status, found.headers, found.content
            answer.is_of_picker = True
            return False
        if reply.WhichOneof("response") != "response_headers":
            raise GatewayError("The answer's first reply must be that to its headers.")
        changed = _changed(dict(headers), reply.response_headers.response.header_mutation)
        answer.status, answer.headers = int(changed.pop(":status")), changed
        return True

    async def _body(self, call: Any, part: str, trailers: str = "") -> bytes:
        found = b""
        while (reply := await call.read()) is not grpc.aio.EOF:
            kind = reply.WhichOneof("response")
            if kind == trailers:
                return found
            if kind != part:
                raise GatewayError(f"A reply to {kind} in the middle of {part}.")
            streamed = getattr(reply, part).response.body_mutation.streamed_response
            if len(streamed.body) > 65_536:
                raise GatewayError("A piece is larger than Envoy takes.")
            found += streamed.body
            if streamed.end_of_stream:
                if trailers:
                    raise GatewayError("A body with trailers ends with these.")
                return found
        raise GatewayError(f"The stream ended in the middle of {part}.")


async def _send_body(call: Any, content: bytes, has_trailers: bool, reading: asyncio.Task[Any]) -> None:
    """Send a body in pieces until there is an answer, as there may be before all of it is sent."""
    pieces = [content[at : at + PIECE_BYTES] for at in range(0, len(content), PIECE_BYTES)] or [b""]
    for at, piece in enumerate(pieces):
        if reading.done():
            return
        is_last = at == len(pieces) - 1 and not has_trailers
        body = Said()
        body.request_body.body, body.request_body.end_of_stream = piece, is_last
        await call.write(body)
    if has_trailers and not reading.done():
        trailers = Said()
        trailers.request_trailers.SetInParent()
        await call.write(trailers)


async def _hand_over(call: Any, given: httpx.Response) -> None:
    """Hand a server's answer over as it comes, without waiting for replies, until the picker has heard enough."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        async for piece in given.aiter_raw():
            said = Said()
            said.response_body.body = piece
            await call.write(said)
        last = Said()
        last.response_body.end_of_stream = True
        await call.write(last)


def _immediate(reply: Any) -> Answer:
    immediate = reply.immediate_response
    headers = _changed({}, immediate.headers)
    return Answer(immediate.status.code, headers, immediate.body, is_of_picker=True)


def _changed(headers: dict[str, str], mutation: Any) -> dict[str, str]:
    found = {name.lower(): value for name, value in headers.items()}
    for option in mutation.set_headers:
        assert option.append_action == 2, "a header must be replaced, not appended to"
        found[option.header.key] = option.header.raw_value.decode()
    for name in mutation.remove_headers:
        found.pop(name, None)
    return found


@asynccontextmanager
async def a_gateway(port: int, certificate: bytes | None = None) -> AsyncIterator[Gateway]:
    """Yield a gateway of a picker on this machine, over TLS where its certificate is given."""
    if certificate is None:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    else:
        named = [("grpc.ssl_target_name_override", "localhost")]
        credentials = grpc.ssl_channel_credentials(certificate)
        channel = grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=named)
    async with channel, httpx.AsyncClient(timeout=30) as http:
        yield Gateway(channel, http)
