"""A service that is ready at once and says where it was told the others are: stands in for the real ones."""

import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from services.kit.sockets import handed_over


class Handler(BaseHTTPRequestHandler):
    """Answers everything with the environment."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(dict(os.environ)).encode())


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(os.environ["GATEWAY_PORT"])), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = handed_over()[0]
    server.serve_forever()
