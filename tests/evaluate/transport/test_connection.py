"""One connection to a server: kept alive, closed by the other side, lied to, held up and flooded by it."""

from __future__ import annotations

import gzip
import json
import select
import shutil
import ssl
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from raw_server import Part, RawServer, endless, trickle

from assay.errors import ServeError
from assay_evaluate.transport import connection as module
from assay_evaluate.transport.connection import Connection, HttpReply, get_once, post_once, root_url
from assay_evaluate.transport.errors import TransportError, UnusableReply
from assay_evaluate.transport.foreign_json import NotJson, message_in, read_json

OK = b"HTTP/1.1 200 OK\r\n"
KEY = "sk-0123456789/abcdef"
MIB = 2**20


class Echo(BaseHTTPRequestHandler):
    """Answers with what it was sent."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


def fails(*parts: Part, total_s: float = 20.0, silence_s: float | None = None, most_bytes: int = MIB) -> str:
    """Why a reply of these parts is none."""
    with RawServer(*parts) as server, pytest.raises(TransportError) as failed:
        Connection(server.base_url, total_s=total_s, silence_s=silence_s).ask("/x", b"{}", most_bytes=most_bytes)
    return str(failed.value)


# ------------------------------------------------------------------------------------------------ what is sent, what comes
@pytest.mark.parametrize(
    ("header", "is_hit"),
    [
        ("cf-aig-cache-status: HIT", True),
        ("cf-aig-cache-status: MISS", False),
        ("x-portkey-cache-status: SEMANTIC HIT", True),
        ("X-LLMGateway-Cache: HIT", True),
        ("X-FreeLLM-Cache: OFF", False),
        ("x-vsr-cache-hit: true", True),
        ("x-vsr-cache-hit: false", False),
        ("X-Cache: Hit from cloudfront", True),
        ("Cache-Status: Proxy; hit; ttl=376", True),
        ("Cache-Control: no-cache", False),
        ("x-litellm-cache-key: 81f3b2", False),
        ("x-kv-cache-status: hit", False),  # of what prompts have in common: the reply is a new one
        ("x-prefix-cache-hit: true", False),
        ("fireworks-cached-prompt-tokens: 512", False),
    ],
)
def test_a_header_that_says_that_a_cache_answers(header: str, is_hit: bool) -> None:
    with RawServer(OK + header.encode() + b"\r\nContent-Length: 2\r\n\r\n{}") as server:
        reply = post_once(server.base_url, "/v1/x", {}, total_s=20)
    assert reply == HttpReply(
        200, b"{}", cache_header=f"{header.partition(':')[0]}:{header.partition(':')[2]}" if is_hit else None
    )


def test_get_and_post_as_the_server_sees_them() -> None:
    with RawServer(OK + b"Content-Length: 2\r\n\r\n{}") as server:
        reply = get_once(f"{server.base_url}/prefix/", "/health", total_s=20, headers={"Authorization": "Bearer x"})
        assert reply == HttpReply(200, b"{}")
        assert post_once(server.base_url, "/v1/x", {"名": 1}, total_s=20).json() == {}
        host = server.base_url.removeprefix("http://")
    assert server.heads == [
        f"GET /prefix/health HTTP/1.1\r\nHost: {host}\r\nAccept-Encoding: identity\r\nAuthorization: Bearer x\r\n",
        f"POST /v1/x HTTP/1.1\r\nHost: {host}\r\nAccept-Encoding: identity\r\nContent-Length: 13\r\n"
        "Content-Type: application/json\r\n",
    ]


def test_proxies_of_the_machine_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with RawServer(OK + b"Content-Length: 2\r\n\r\n{}") as server:
        assert get_once(server.base_url, "/", total_s=20).status == 200


def test_connection_that_was_closed_while_idle_is_opened_anew() -> None:
    """As servers do after some seconds, without a word in the reply before."""

    class Handler(Echo):
        def do_POST(self) -> None:
            super().do_POST()
            self.close_connection = True

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        connection = Connection(f"http://127.0.0.1:{server.server_address[1]}/prefix", total_s=20)
        for number in range(5):
            assert connection.ask("/echo", b"%d" % number) == HttpReply(200, b"%d" % number)
            poll = select.poll()
            poll.register(connection._http.sock, select.POLLIN)
            assert poll.poll(20_000), "the server has not hung up"
        connection.close()
        server.shutdown()
    with pytest.raises(TransportError, match="ConnectionRefusedError"):
        connection.ask("/echo", b"{}")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_https_with_a_certificate_that_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 9 -subj /CN=x"
    command = [*make.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        url = f"https://127.0.0.1:{server.server_address[1]}"
        module._certificates.cache_clear()
        with pytest.raises(TransportError, match="CERTIFICATE_VERIFY_FAILED"):
            get_once(url, "/", total_s=20)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        module._certificates.cache_clear()
        connection = Connection(url, total_s=20)
        for body in (b"1", b"x" * 3 * MIB, b"2"):
            assert connection.ask("/", body) == HttpReply(200, body)
        connection.close()
        server.shutdown()
    module._certificates.cache_clear()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("localhost:8000", "localhost:8000: is no address of a server (it has no http:// or https://, or no host)"),
        ("ftp://host", "ftp://host: is no address of a server (it has no http://"),
        ("http://host:99999", "http://host:99999: is no address of a server (Port out of range 0-65535)"),
        ("http://", "no host"),
        (
            "http://host:8000?key=1",
            "http://host:8000: is no address of a server (it has something behind its path (`?` or `#`))",
        ),
        ("http://a b", "http://a b: is no address of a server (it holds a blank or a character that no URL may hold)"),
        ("http://host/\u00e4", "http://host/\u00e4: is no address of a server (it holds a blank or a character that no URL"),
        ("http://me:secret@host", "host: is no address of a server (it holds a user or a password)"),
    ],
)
def test_what_is_no_address(url: str, why: str) -> None:
    with pytest.raises(ServeError) as refused:
        Connection(url, total_s=1)
    assert why in str(refused.value) and "secret" not in str(refused.value)
    assert str(refused.value).endswith("; give http://HOST:PORT")


def test_root_url() -> None:
    assert [root_url(url) for url in ("http://a/v1/", "http://a/v1", "http://a/", "http://a/b/v1")] == ["http://a"] * 3 + [
        "http://a/b"
    ]


# ------------------------------------------------------------------------------------------------ time
def test_a_server_that_says_nothing() -> None:
    assert fails(lambda sock: sock.recv(1), total_s=0.2) == "TimeoutError: no reply within 0.2 s"


def test_a_reply_that_trickles_ends() -> None:
    """Each drop comes in time; the whole does not."""
    said = fails(OK + b"Content-Length: 1000\r\n\r\n", trickle(b"x", 0.02), total_s=0.3)
    assert said.startswith("TimeoutError: the reply was not complete after 0.3 s (")
    assert fails(OK, trickle(b"X: y\r\n", 0.02), total_s=0.3).startswith(
        "TimeoutError: the reply was not complete after 0.3 s ("
    )
    chunks = OK + b"Transfer-Encoding: chunked\r\n\r\n"
    assert fails(chunks, trickle(b"1\r\nx\r\n", 0.02), total_s=0.3).startswith("TimeoutError: the reply was not complete")


def pause(sock: Any) -> None:
    threading.Event().wait(0.3)


def test_silence_counts_from_the_first_byte_on() -> None:
    """A reply is made before its first byte; who is silent in the middle has stopped."""
    with RawServer(pause, OK + b"Content-Length: 2\r\n\r\n{}") as server:
        connection = Connection(server.base_url, total_s=20, silence_s=0.1)
        assert connection.ask("/x", b"{}") == HttpReply(200, b"{}")
        connection.close()
    said = fails(OK + b"Content-Length: 2\r\n\r\n{", trickle(b"", 0.3), silence_s=0.1)
    assert said == "TimeoutError: the reply stopped for 0.1 s"


def test_a_server_that_accepts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(self: Any) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr(module.http.client.HTTPConnection, "connect", never)
    with pytest.raises(TransportError, match=r"^TimeoutError: no connection within 10 s$"):
        get_once("http://127.0.0.1:1", "/", total_s=20)


def test_a_host_that_vanishes_is_noticed() -> None:
    with RawServer(OK + b"Content-Length: 2\r\n\r\n{}", trickle(b"", 1)) as server:
        connection = Connection(server.base_url, total_s=20)
        connection.ask("/")
        sock = connection._http.sock
        assert sock.getsockopt(module.socket.SOL_SOCKET, module.socket.SO_KEEPALIVE) == 1
        connection.close()


# ------------------------------------------------------------------------------------------------ bytes
TOO_LARGE = "TooLarge: the reply has more than 1,048,576 bytes (1 MiB), the most taken"


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param((OK + b"Content-Length: %d\r\n\r\n" % (MIB + 1), trickle(b"", 9)), id="announced"),
        pytest.param((OK + b"\r\n", endless(b"x" * 65536)), id="not announced"),
        pytest.param((OK + b"Transfer-Encoding: chunked\r\n\r\n", endless(b"8000\r\n" + b"x" * 0x8000 + b"\r\n")), id="chunks"),
        pytest.param((OK + b"Transfer-Encoding: chunked\r\n\r\n", endless(b"1\r\nx\r\n" * 9999)), id="chunks of a byte"),
        pytest.param((OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", endless(b"X: y\r\n" * 9999)), id="trailers"),
        pytest.param((endless(b"HTTP/1.1 100 Continue\r\n\r\n" * 999),), id="interim replies"),
    ],
)
def test_more_bytes_than_are_taken(parts: tuple[Part, ...]) -> None:
    assert fails(*parts) == TOO_LARGE


def test_a_reply_of_65_mib_and_one_of_64() -> None:
    """The limit nobody names is 64 MiB, headers included; who expects more says so."""
    body = b"x" * (65 * MIB)
    with RawServer(OK + b"Content-Length: %d\r\n\r\n" % len(body), body) as server:
        with pytest.raises(UnusableReply, match=r"more than 67,108,864 bytes \(64 MiB\), the most taken"):
            post_once(server.base_url, "/x", {}, total_s=60)
        assert len(post_once(server.base_url, "/x", {}, total_s=60, most_bytes=66 * MIB).body) == 65 * MIB


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ((OK + b"Content-Length: 10\r\n\r\n{}",), "IncompleteRead: IncompleteRead(0 bytes read, 8 more expected)"),
        ((OK + b"Content-Length: 99999999999999999999\r\n\r\n{}",), TOO_LARGE),
        ((OK + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n{}",), "IncompleteRead"),
        ((OK + b"Transfer-Encoding: chunked\r\n\r\nffffffffffff\r\n{}",), "IncompleteRead"),
        ((OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}",), "IncompleteRead"),
        ((OK, endless(b"X: y\r\n")), "HTTPException: got more than 100 headers"),
        ((OK, b"X: ", endless(b"y" * 4096)), "LineTooLong"),
        ((b"SSH-2.0-OpenSSH_9.2\r\n",), "BadStatusLine"),
        ((), "RemoteDisconnected"),
    ],
)  # fmt: skip
def test_replies_that_lie(parts: tuple[Part, ...], why: str) -> None:
    assert fails(*parts).startswith(why)


def test_what_follows_a_reply_is_not_the_next_one() -> None:
    """A server that announces less than it sends: its next reply would begin in the middle, or be somebody else's."""
    both = OK + b"Content-Length: 5\r\n\r\nfirst" + OK + b"Content-Length: 6\r\n\r\nsecond"
    with RawServer(both, trickle(b"", 9)) as server:
        connection = Connection(server.base_url, total_s=20)
        assert [connection.ask("/x", b"{}").body for _ in range(3)] == [b"first"] * 3
        connection.close()
        assert len(server.heads) == 3


def test_compression_that_nobody_asked_for() -> None:
    bomb = gzip.compress(b"{}" * 9999)
    head = OK + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(bomb)
    assert fails(head + bomb) == "Compressed: the reply is compressed (gzip), which was not asked for"


# ------------------------------------------------------------------------------------------------ errors, redirects, JSON
def test_a_redirect_is_not_followed() -> None:
    with RawServer(
        b"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://127.0.0.1:1/x\x1b[0m\r\nContent-Length: 0\r\n\r\n"
    ) as server:
        reply = post_once(server.base_url, "/x", {}, total_s=20)
    assert (reply.status, len(server.heads)) == (307, 1)
    assert reply.message == (
        "a redirect to http://127.0.0.1:1/x\\u001b[0m, which is not followed; give the address it leads to"
    )


@pytest.mark.parametrize(
    ("wait", "seconds"),
    [("7", 7.0), ("0", 0.0), ("soon", None), ("-1", None), ("1e999", None), ("nan", None), ("9" * 5000, None)],
)
def test_retry_after(wait: str, seconds: float | None) -> None:
    head = f"HTTP/1.1 429 Too Many Requests\r\nRetry-After: {wait}\r\nContent-Length: 0\r\n\r\n"
    with RawServer(head.encode()) as server:
        assert post_once(server.base_url, "/x", {}, total_s=20).retry_after_s == seconds


def test_retry_after_a_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "time", lambda: 1_800_000_000.0)
    with RawServer(b"HTTP/1.1 503 X\r\nRetry-After: Fri, 15 Jan 2027 08:00:30 GMT\r\nContent-Length: 0\r\n\r\n") as server:
        assert post_once(server.base_url, "/x", {}, total_s=20).retry_after_s == 30.0


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"<!DOCTYPE html><p>Sign in", "no JSON (Expecting value: line 1 column 1 (char 0)): '<!DOCTYPE html><p>Sign in'"),
        (b"", "no JSON (Expecting value: line 1 column 1 (char 0)): ''"),
        (b'{"a": ' * 100_000, "no readable JSON: nested too deeply"),
        (b"[" * 100_000 + b"]" * 100_000, "no readable JSON: nested too deeply"),
        (b"1" * 5000, "no JSON (Exceeds the limit (4300 digits) for integer string conversion"),
        (b'"\xff\xfe"', "no JSON ('utf-8' codec can't decode byte 0xff"),
    ],
)
def test_what_is_no_json(body: bytes, why: str) -> None:
    with pytest.raises(NotJson) as failed:
        read_json(body)
    assert str(failed.value).startswith(why) and len(str(failed.value)) < 400
    message_in(body)  # whatever it is, an error of a server can be told


# ------------------------------------------------------------------------------------------------ keys
@pytest.mark.parametrize("spelt", [KEY, json.dumps(KEY), KEY.replace("/", "\\/")])
@pytest.mark.parametrize("status", [200, 401])
def test_a_server_that_repeats_the_key(spelt: str, status: int) -> None:
    body = json.dumps({"error": {"message": "Incorrect API key: KEY"}}).replace("KEY", spelt.strip('"')).encode()
    with RawServer(
        b"HTTP/1.1 %d X\r\nLocation: /%s\r\nContent-Length: %d\r\n\r\n" % (status, KEY.encode(), len(body)), body
    ) as server:
        connection = Connection(server.base_url, total_s=20, headers={"Authorization": f"Bearer {KEY}"})
        reply = connection.ask("/x", b"{}")
        connection.close()
    assert f"Authorization: Bearer {KEY}\r\n" in server.heads[0]
    assert reply.message == "Incorrect API key: [hidden]"
    assert KEY not in repr(reply) + repr(connection)


def test_a_status_line_that_repeats_the_key() -> None:
    with RawServer(f"HTTP/9 {KEY}\r\n".encode()) as server, pytest.raises(TransportError) as failed:
        get_once(server.base_url, "/", total_s=20, headers={"Authorization": f"Bearer {KEY}"})
    assert "[hidden]" in str(failed.value) and KEY not in str(failed.value)


@pytest.mark.parametrize("head", [f"{'x' * 185}{KEY}\r\n", f"HTTP/1.1 200 OK\r\nContent-Encoding: {KEY}\r\n\r\n"])
def test_no_part_of_the_key_is_in_an_error(head: str) -> None:
    """Neither a half, where the message is cut, nor the whole, where a header is refused."""
    with RawServer(head.encode()) as server, pytest.raises(TransportError) as failed:
        get_once(server.base_url, "/", total_s=20, headers={"Authorization": f"Bearer {KEY}"})
    assert "[hidden]" in str(failed.value) and KEY[:8] not in str(failed.value)


def test_a_short_key_is_not_searched_for_in_replies() -> None:
    """`--api-key token` and a reply with token_ids: what was measured stays as it came."""
    body = b'{"token_ids": [1]}'
    with RawServer(OK + b"Content-Length: %d\r\n\r\n" % len(body), body) as server:
        assert get_once(server.base_url, "/", total_s=20, headers={"Authorization": "Bearer token"}).body == body


# ------------------------------------------------------------------------------------------------ streams
def test_hang_up_after_some_events() -> None:
    stream = OK + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    gone = threading.Event()

    def flood(sock: Any) -> None:
        try:
            endless(b"d\r\ndata: {}\n\n: \n\r\n")(sock)
        finally:
            gone.set()

    with RawServer(stream, flood) as server:
        connection = Connection(server.base_url, total_s=20)
        assert connection.count_events("/x", b"{}", 3) == 3
        assert gone.wait(20), "the server still sends"
    with RawServer(stream + b"8\r\ndata: 1\n\r\n0\r\n\r\n") as server:
        assert Connection(server.base_url, total_s=20).count_events("/x", b"{}", 3) == 1
    with RawServer(OK + b"\r\n", endless(b"x" * 65536)) as server, pytest.raises(UnusableReply):
        Connection(server.base_url, total_s=20).count_events("/x", b"{}", 3)


READ_WITHOUT_END = """
import sys, threading
from pathlib import Path
from assay_evaluate.transport.connection import Connection
from assay_evaluate.transport.errors import UnusableReply

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

def read(turn, go_on):
    turn.wait()
    try:
        Connection(sys.argv[1], total_s=60).ask("/")
    except UnusableReply:
        refused.append(resident_mib())
    go_on.wait()

refused, go_on = [], threading.Event()
turns = [threading.Event() for _ in range(6)]
threads = [threading.Thread(target=read, args=(turn, go_on)) for turn in turns]
for thread in threads:
    thread.start()
for number, turn in enumerate(turns):
    turn.set()
    while len(refused) <= number and threads[number].is_alive():
        threading.Event().wait(0.01)
go_on.set()
print(*refused)
"""


def test_memory_of_bodies_without_end_is_given_back() -> None:
    """Each of six threads reads up to the bound of 64 MiB; in pieces it stayed with the thread's own heap."""
    with RawServer(b"HTTP/1.1 200 OK\r\n\r\n", endless(b"x" * 2**16)) as server:
        words = [sys.executable, "-c", READ_WITHOUT_END, server.base_url]
        said = subprocess.run(words, check=True, capture_output=True, text=True, timeout=120).stdout
    resident = list(map(int, said.split()))
    assert len(resident) == 6 and max(resident) - resident[0] < 64, resident
