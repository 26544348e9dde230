"""One connection to a server: kept alive, closed by the other side, attacked."""

from __future__ import annotations

import select
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from assay_evaluate.transport.connection import Connection, HttpReply, TransportError


def test_connection_that_was_closed_while_idle_is_opened_anew() -> None:
    """As servers do after some seconds, without a word in the reply before."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        connection = Connection(f"http://127.0.0.1:{server.server_address[1]}/prefix", read_s=20)
        for number in range(5):
            assert connection.post("/echo", b"%d" % number) == HttpReply(200, b"%d" % number)
            poll = select.poll()
            poll.register(connection._http.sock, select.POLLIN)  # type: ignore[arg-type]
            assert poll.poll(20_000), "the server has not hung up"
        connection.close()
        server.shutdown()
    with pytest.raises(TransportError, match="ConnectionRefusedError"):
        connection.post("/echo", b"{}")
