"""Why a request has no reply."""

from __future__ import annotations


class TransportError(Exception):
    """No whole HTTP reply came: refused, reset, timed out, not HTTP."""


class BrokenOff(TransportError):
    """A reply that began, and ended before all of it was there."""


class UnusableReply(TransportError):
    """A reply that is not taken, and would be the same the next time: it is too large, or compressed."""


class AnothersReply(ValueError):
    """A reply that answers another request than the one that it came to."""
