"""A service that is ready at once and says where it was told the others are: stands in for the real ones."""

import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Answers everything with the environment."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(dict(os.environ)).encode())


if __name__ == "__main__":
    ThreadingHTTPServer((os.environ["GATEWAY_HOST"], int(os.environ["GATEWAY_PORT"])), Handler).serve_forever()
