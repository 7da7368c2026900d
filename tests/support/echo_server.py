"""A server that answers HTTP with `hello` and echoes the messages of a WebSocket; run as a program, `--port=N`."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import sys

MAGIC = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    except asyncio.IncompleteReadError:  # somebody looks whether it listens
        writer.close()
        return
    fields = dict(line.split(": ", 1) for line in head.splitlines()[1:] if line)
    if key := fields.get("Sec-WebSocket-Key"):
        accept = base64.b64encode(hashlib.sha1((key + MAGIC).encode()).digest()).decode()
        lines = ["HTTP/1.1 101 Switching Protocols", "Upgrade: websocket", f"Sec-WebSocket-Accept: {accept}", "", ""]
        writer.write("\r\n".join(lines).encode())
        while header := await reader.read(1):
            length = (await reader.readexactly(1))[0] & 127
            mask = await reader.readexactly(4)
            sent = await reader.readexactly(length)
            data = bytes(byte ^ mask[at % 4] for at, byte in enumerate(sent))
            writer.write(header + bytes([length]) + data)
            await writer.drain()
    else:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
        await writer.drain()
    writer.close()


async def main() -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[1].removeprefix("--port=")))
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
