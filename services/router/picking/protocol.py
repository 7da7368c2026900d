"""Envoy's external processing, version 3, and what Gateway API's inference extension says over it.

The messages are made from the published definitions (``ext_proc.binpb``: their descriptors without the annotations), so
that no code is generated.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from google.protobuf import any_pb2, duration_pb2, struct_pb2, wrappers_pb2
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from services.kit.edge.exchange import Header

SERVICE, METHOD = "envoy.service.ext_proc.v3.ExternalProcessor", "Process"
DESTINATION, SUBSET = "x-gateway-destination-endpoint", "x-gateway-destination-endpoint-subset"
CHUNK_BYTES = 62_000  #: Of a body: some gateways take no more than 64 KiB in a message
FULL_DUPLEX = 4  #: ``FULL_DUPLEX_STREAMED``: bodies pass in pieces, and a reply need not wait for the whole
_OVERWRITE = 2  #: ``OVERWRITE_IF_EXISTS_OR_ADD``


def _messages() -> tuple[Any, Any]:
    pool = DescriptorPool()
    for known in (any_pb2, duration_pb2, struct_pb2, wrappers_pb2):
        pool.AddSerializedFile(known.DESCRIPTOR.serialized_pb)
    for each in FileDescriptorSet.FromString(Path(__file__).with_name("ext_proc.binpb").read_bytes()).file:
        pool.Add(each)
    method = pool.FindServiceByName(SERVICE).FindMethodByName(METHOD)
    return GetMessageClass(method.input_type), GetMessageClass(method.output_type)


Said, Reply = _messages()
"""What a gateway says (``ProcessingRequest``), and what it is told (``ProcessingResponse``), below in bytes."""


def headers_of(message: Any) -> list[Header]:
    """Return the headers of a message, names in lower case."""
    return [(each.key.lower().encode(), each.raw_value or each.value.encode()) for each in message.headers.headers]


def subset_of(said: Any) -> frozenset[bytes] | None:
    """Return the addresses, ``host:port``, that the gateway may send the request to; None for any."""
    hint = said.metadata_context.filter_metadata.get("envoy.lb.subset_hint")
    if hint is None or SUBSET not in hint.fields:
        return None
    given = hint.fields[SUBSET]
    values = [each.string_value for each in given.list_value.values] or [given.string_value]
    return frozenset(each.strip().encode() for value in values for each in value.split(",") if each.strip())


def refuses(said: Any) -> str | None:
    """Return why a gateway's way of passing bodies cannot be served; None if it can."""
    if not said.HasField("protocol_config"):
        return None  # of older gateways, which do not say
    config = said.protocol_config
    if config.request_body_mode == config.response_body_mode == FULL_DUPLEX:
        return None
    return "The endpoint picker needs request_body_mode and response_body_mode FULL_DUPLEX_STREAMED."


def to_server(authority: bytes, headers: Iterable[Header], dropped: Iterable[bytes]) -> bytes:
    """Return the reply that sends a request to a server, with ``headers`` set and others dropped."""
    reply = Reply()
    common = reply.request_headers.response
    _change(common.header_mutation, [(DESTINATION.encode(), authority), *headers], dropped)
    common.clear_route_cache = True
    place = reply.dynamic_metadata.fields["envoy.lb"].struct_value.fields[DESTINATION]
    place.string_value = authority.decode("latin-1")
    return reply.SerializeToString()


def answer_begins(status: int, headers: Iterable[Header], dropped: Iterable[bytes]) -> bytes:
    """Return the reply by which an answer begins with another status and headers than its server gave it."""
    reply = Reply()
    mutation = reply.response_headers.response.header_mutation
    _change(mutation, [(b":status", b"%d" % status), *headers], dropped)
    return reply.SerializeToString()


def body_of(way: str, content: bytes, *, is_last: bool, has_trailers: bool = False) -> list[bytes]:
    """Return the replies to a body, of ``request`` or ``response``, none longer than a gateway takes.

    Trailers, which come after it, are left as they are.
    """
    replies = [Reply() for _ in range(0, len(content) or 1, CHUNK_BYTES)]
    for at, reply in enumerate(replies):
        streamed = getattr(reply, f"{way}_body").response.body_mutation.streamed_response
        streamed.body = content[at * CHUNK_BYTES : (at + 1) * CHUNK_BYTES]
        streamed.end_of_stream = is_last and not has_trailers and reply is replies[-1]
    if has_trailers:
        replies.append(Reply())
        getattr(replies[-1], f"{way}_trailers").SetInParent()
    return [each.SerializeToString() for each in replies]


def at_once(status: int, headers: Iterable[Header], content: bytes) -> bytes:
    """Return the reply by which the gateway answers the client itself."""
    reply = Reply()
    immediate = reply.immediate_response
    immediate.status.code = status
    _change(immediate.headers, [each for each in headers if each[0] != b"content-length"], ())
    immediate.body = content
    return reply.SerializeToString()


def _change(mutation: Any, headers: Iterable[Header], dropped: Iterable[bytes]) -> None:
    add = mutation.set_headers.add
    for name, value in headers:
        header = add(append_action=_OVERWRITE).header
        header.key, header.raw_value = name.decode("latin-1"), value
    mutation.remove_headers.extend([name.decode("latin-1") for name in dropped])
