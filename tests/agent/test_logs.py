"""A rank's output over HTTP: by offset, by size, and only for the control plane."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_agent.logs import read_piece, trim
from services.contracts.nodes import LOG_EOF_HEADER, LOG_NEXT_OFFSET_HEADER, LOG_OFFSET_HEADER, LOG_SIZE_HEADER
from tests.agent.conftest import Node, eventually
from tests.agent.stand_in import JOIN_TOKEN, headers_to


async def test_output_is_read_piece_by_piece_to_its_end(node: Node) -> None:
    await node.start()
    go = node.folder / "go"
    gang = await node.run("sh", "-c", f"printf 0123456789; while [ ! -e {go} ]; do sleep 0.05; done; printf abc")
    stdout = node.rank_dir(gang) / "stdout"
    await eventually(lambda: stdout.exists() and stdout.read_text() == "0123456789")
    assert await _read(node, gang, "offset=4&limit=3") == (b"456", 4, 7, 10, False)
    assert await _read(node, gang, "offset=-2") == (b"89", 8, 10, 10, False)
    assert await _read(node, gang, "offset=10") == (b"", 10, 10, 10, False)
    assert await _read(node, gang, "offset=9999") == (b"", 10, 10, 10, False)
    go.touch()
    await eventually(lambda: node.plane.state(gang) == "exited")
    assert await _read(node, gang, "offset=7&limit=3") == (b"789", 7, 10, 13, False)
    assert await _read(node, gang, "offset=10") == (b"abc", 10, 13, 13, True)
    assert await _read(node, gang, "stream=stderr") == (b"", 0, 0, 0, True)
    node.plane.named.clear()
    await eventually(lambda: node.plane.rank(gang) is None)
    assert (await _read(node, gang, ""))[0] == b"0123456789abc", "kept after everybody has forgotten the gang"


async def test_only_the_control_plane_reads(node: Node) -> None:
    await node.start()
    for path in ("/v1/allocations/job_1.1/logs", "/v1/state"):
        for token in ("", "wrong", JOIN_TOKEN, *(headers_to("another-node")["authorization"].split()[1:])):
            assert (await node.get(path, token=token))[0] == 401
    for path in ("/healthz", "/readyz"):
        assert (await node.get(path, token=""))[0] == 200


async def test_what_is_not_there_or_asked_wrongly(node: Node) -> None:
    await node.start()
    gang = await node.run("true")
    await eventually(lambda: node.plane.state(gang) == "exited")
    for name in ("job_none.1", "..", ".%2e", "%2e%2e%2f" + gang, ".hidden"):
        assert (await node.get(f"/v1/allocations/{name}/logs"))[0] in (403, 404)
    for query in ("stream=order", "limit=0", "limit=99999999", "offset=x"):
        assert (await node.get(f"/v1/allocations/{gang}/logs?{query}"))[0] == 422


def test_a_long_stream_keeps_its_newer_half_and_its_offsets(tmp_path: Path) -> None:
    path = tmp_path / "stdout"
    lines = b"".join(b"%07d\n" % number for number in range(500_000))
    path.write_bytes(lines)
    assert trim(path, 8 << 20) is False, "not too long yet"
    if not trim(path, 1 << 20):
        pytest.skip("this file system does not punch holes")
    assert path.stat().st_blocks * 512 <= 1 << 20
    piece = read_piece(path, 0, 100)
    assert piece.size == len(lines)
    assert piece.offset >= len(lines) - (1 << 20)
    assert piece.data == lines[piece.offset : piece.offset + 100]
    with path.open("ab") as file:
        file.write(b"end")
    assert read_piece(path, -3, 10).data == b"end"


async def _read(node: Node, gang: str, query: str) -> tuple[bytes, int, int, int, bool]:
    status, headers, body = await node.get(f"/v1/allocations/{gang}/logs?{query}")
    assert status == 200
    numbers = [int(headers[name]) for name in (LOG_OFFSET_HEADER, LOG_NEXT_OFFSET_HEADER, LOG_SIZE_HEADER)]
    return body, numbers[0], numbers[1], numbers[2], headers[LOG_EOF_HEADER] == "true"
