"""Access to the page.

    served on        seen by
    loopback         everybody on this host, but not other web pages in the same browser, see below
    anything else    everybody with the cluster's secret: HTTP digest authentication (RFC 7616) with SHA-256, any user
                     name, and the secret as the password. It is proved and never sent

A page on the internet can have a browser connect to loopback under a name of its own choice (DNS rebinding), so on
loopback a request must name a loopback host. Digest authentication hides the secret, not the page: for that use
``farcall dashboard --connect`` on your own machine over a network you trust, or a tunnel.

Sans-I/O: headers in, a verdict out. Invariant: no answer twice with the same nonce and count.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import threading
from typing import Final
from urllib.parse import urlsplit

from farcall.runtime.rendezvous.addresses import is_loopback

__all__ = ["Access", "Denied"]

REALM: Final = "farcall"
NONCE_S: Final = 300.0
_PART = re.compile(r'(\w+)=(?:"([^"]*)"|([^\s,]+))')


class Denied(Exception):
    """The request is not answered."""

    def __init__(self, status: int, why: str, challenge: str = "") -> None:
        super().__init__(why)
        self.status = status
        self.challenge = challenge
        """For the header ``WWW-Authenticate``."""


class Access:
    """The rules for one server."""

    def __init__(self, secret: bytes | None) -> None:
        """``secret``: the password; None: the server is on loopback, and needs none."""
        self._secret = secret
        self._key = secrets.token_bytes(32)
        self._used: dict[str, set[str]] = {}
        self._lock = threading.Lock()

    def check(self, method: str, target: str, host: str, authorization: str, now: float) -> None:
        """Raise `Denied` unless this request may be answered."""
        if self._secret is None:
            try:
                name = urlsplit(f"//{host}").hostname or ""
            except ValueError:
                name = ""
            if not is_loopback(name):
                raise Denied(403, "on loopback this page is served to loopback names only, such as http://127.0.0.1")
            return
        if not authorization:
            raise Denied(401, "the cluster's secret is needed", self._challenge(now))
        kind, _, rest = authorization.partition(" ")
        found = _PART.findall(rest) if kind.lower() == "digest" else []
        parts = {name: quoted or plain for name, quoted, plain in found}
        nonce, count = parts.get("nonce", ""), parts.get("nc", "")
        text, _, signature = nonce.rpartition(":")
        if not hmac.compare_digest(self._sign(text).encode(), signature.encode()):
            raise Denied(401, "an unknown nonce", self._challenge(now))
        if now - float(nonce.partition(":")[0]) > NONCE_S:
            raise Denied(401, "the nonce is too old", self._challenge(now, stale=True))
        if parts.get("uri") != target or not hmac.compare_digest(self._proof(method, parts), parts.get("response", "")):
            raise Denied(401, "that is not the cluster's secret", self._challenge(now))
        with self._lock:
            for old in [one for one in self._used if now - float(one.partition(":")[0]) > NONCE_S]:
                del self._used[old]
            used = self._used.setdefault(nonce, set())
            if count in used:
                raise Denied(401, "this proof was used before", self._challenge(now, stale=True))
            used.add(count)

    def _challenge(self, now: float, stale: bool = False) -> str:
        text = f"{now:.3f}:{secrets.token_hex(8)}"
        nonce = f"{text}:{self._sign(text)}"
        return f'Digest realm="{REALM}", qop="auth", algorithm=SHA-256, nonce="{nonce}"' + ", stale=true" * stale

    def _sign(self, text: str) -> str:
        return hmac.new(self._key, text.encode(), "sha256").hexdigest()

    def _proof(self, method: str, parts: dict[str, str]) -> str:
        assert self._secret is not None
        user = _hash(f"{parts.get('username', '')}:{REALM}:".encode() + self._secret)
        request = _hash(f"{method}:{parts.get('uri', '')}".encode())
        rest = (parts.get("nonce", ""), parts.get("nc", ""), parts.get("cnonce", ""), "auth", request)
        return _hash(":".join((user, *rest)).encode())


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
