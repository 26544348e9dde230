"""A server on the loopback that sends whatever bytes a test says, whole or in drops: HTTP that no library would write.

    with RawServer(b"HTTP/1.1 200 OK\\r\\n\\r\\n", drop, drop) as server:
        ...  server.base_url, server.heads

Each part is bytes, or a function that is called with the socket. After the last part the connection is closed; the same parts
are sent to every connection.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from types import TracebackType

Part = bytes | Callable[[socket.socket], None]


class RawServer:
    def __init__(self, *parts: Part) -> None:
        self.heads: list[str] = []
        """Request line and headers of each request."""
        self._parts = parts
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> RawServer:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        with socket.create_connection(self._listener.getsockname()):
            pass  # wakes the thread
        self._thread.join(20)
        self._listener.close()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def parts_for(self, head: bytes, body: bytes) -> Sequence[Part]:
        """What is sent to a request."""
        return self._parts

    def _serve(self) -> None:
        while True:
            client, _ = self._listener.accept()
            if self._over.is_set():
                client.close()
                return
            threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        with client, client.makefile("rb") as reader:
            head = b"".join(iter(reader.readline, b"\r\n"))
            self.heads.append(head.decode("latin-1"))
            length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
            body = reader.read(int(length or 0))
            try:
                for part in self.parts_for(head, body):
                    if callable(part):
                        part(client)
                    else:
                        client.sendall(part)
            except OSError:
                return  # the client has hung up


def endless(piece: bytes) -> Callable[[socket.socket], None]:
    """Sends `piece` until the client hangs up."""

    def send(client: socket.socket) -> None:
        while True:
            client.sendall(piece)

    return send


def trickle(piece: bytes, every_s: float) -> Callable[[socket.socket], None]:
    """Sends `piece` again and again, with a pause before each."""

    def send(client: socket.socket) -> None:
        pause = threading.Event()
        while not pause.wait(every_s):
            client.sendall(piece)

    return send
