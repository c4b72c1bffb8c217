"""Keys made from the cluster's secret."""

from __future__ import annotations

import hmac

__all__ = ["hkdf_expand", "hkdf_extract", "observer_key"]


def observer_key(secret: bytes) -> bytes:
    """What stands in for the secret where an observer proves itself: whoever has only this can become no member."""
    return hkdf_expand(hkdf_extract(b"farcall observer", secret), b"key")


def hkdf_extract(salt: bytes, secret: bytes) -> bytes:
    """RFC 5869, first step, with SHA-256."""
    return hmac.digest(salt, secret, "sha256")


def hkdf_expand(key: bytes, info: bytes) -> bytes:
    """RFC 5869, second step, with SHA-256, for 32 bytes: its first block."""
    return hmac.digest(key, info + b"\x01", "sha256")
