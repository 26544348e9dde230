"""Addresses of servers: whether a URL can be one, and whether two are one place."""

from __future__ import annotations

import ipaddress
import re
import socket
from urllib.parse import urlsplit

_HERE = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0", "::"})
_DEFAULT_PORTS = {"http": 80, "https": 443}


def problem_with(url: str) -> str | None:
    """Why `url` cannot be a server's address; None: it can. What may be a password or a key is not in it."""
    shown_url = repr(re.split(r"[?#]", url.rpartition("@")[2])[0])
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return f"{shown_url} is no URL; write it as http://HOST:PORT"
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname or not url.isprintable() or " " in url or port == 0:
        return f"{shown_url} is no URL of a server; write it as http://HOST:PORT"
    if parts.username is not None or parts.password is not None:
        return f"the URL for {parts.hostname} holds a user or password, which records would keep; name a variable (api_key_env)"
    if parts.query or parts.fragment:
        return f"{shown_url} has something behind its path (`?` or `#`); write it as http://HOST:PORT"
    return None


def server_place(url: str) -> tuple[str, int, str]:
    """(host, port, path) of an address: equal for two spellings of one server, as far as the text shows it."""
    parts = urlsplit(url)
    host = _canonical((parts.hostname or "").rstrip("."))
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return "localhost" if host in _HERE else host, parts.port or _DEFAULT_PORTS[parts.scheme], path


def _canonical(host: str) -> str:
    """One spelling of a number: 127.1 and 0x7f000001 are 127.0.0.1. A name stays as it is."""
    try:
        return socket.inet_ntoa(socket.inet_aton(host))
    except (OSError, UnicodeError):
        try:
            number = ipaddress.IPv6Address(host)
        except ValueError:
            return host
    return str(number.ipv4_mapped or number)
