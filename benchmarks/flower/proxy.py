"""A recording proxy between a node and its SuperLink: it counts what passes, byte by byte.

It ends TLS on the node's side with the certificate of the SuperLink and begins it anew on the
other, so it can only stand where somebody has that key: on the machine of a trial.
"""

from __future__ import annotations

import contextlib
import http.client
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple


class Passed(NamedTuple):
    """One request: what was called, and the bytes of both bodies."""

    path: str
    sent: int
    received: int


class Recorder:
    """What passed through a proxy."""

    def __init__(self, port: int) -> None:
        self.port, self.passed = port, list[Passed]()

    @property
    def sent(self) -> int:
        """Bytes that left the node."""
        return sum(p.sent for p in self.passed)

    @property
    def received(self) -> int:
        """Bytes that the node got."""
        return sum(p.received for p in self.passed)


@contextlib.contextmanager
def record(port: int, keys: Path, host: str = "127.0.0.1") -> Iterator[Recorder]:
    """Stand before the SuperLink at ``port``; ``keys`` holds ca.pem, server.pem and server.key."""
    trusted = ssl.create_default_context(cafile=str(keys / "ca.pem"))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1
        disable_nagle_algorithm = True

        def setup(self) -> None:
            self.upstream = http.client.HTTPSConnection(host, port, context=trusted)
            super().setup()

        def finish(self) -> None:
            self.upstream.close()
            with contextlib.suppress(OSError):  # the node went without a word
                super().finish()
            self.request.close()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {k: v for k, v in self.headers.items() if k.lower() != "connection"}
            try:
                self.upstream.request("POST", self.path, body, headers)
                response = self.upstream.getresponse()
                content = response.read()
            except (OSError, http.client.HTTPException):
                self.close_connection = True
                return
            recorder.passed.append(Passed(self.path, len(body), len(content)))
            self.send_response_only(response.status, response.reason)
            for name, value in response.getheaders():
                if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            self.wfile.flush()

        def log_message(self, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer((host, 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(str(keys / "server.pem"), str(keys / "server.key"))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.daemon_threads = False
    recorder = Recorder(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield recorder
    finally:
        server.shutdown()
        server.server_close()
