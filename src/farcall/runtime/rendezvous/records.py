"""Records in a store, each authenticated with a key made from the secret: a store has no access control of its own.

Owns the secret of a member that was given none (`secret_of`), the proofs (`Proofs`), and a store that checks them
(`Records`). A record is

    64 or 128 hexadecimal digits    HMAC-SHA256, under a key made from each of the writer's secrets, of the record's key
                                    and text: during a change of the secret readers may know only one of the two
    a line feed
    text                            JSON

so an attacker who reaches the store without the secret can remove records, or bring old ones back, but can neither
alter one nor move it to another key. Readers guard themselves against old records: every member confirms only a table
that names its own incarnation (`static.py`), and a contact has to prove itself when it is dialled.

A member that was given no secret uses its user's key: random bytes in a file that only the user may read. So members of
one user on one machine meet without a configured secret, wherever their store is; all others cannot prove that key, and
get an error that asks for a secret.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

import msgspec

from farcall.errors import InitError, WrongSecret
from farcall.options import ENV_SECRET, ENV_SECRET_FILE, RpcBackendOptions
from farcall.private_files import private_bytes, runtime_directory
from farcall.protocol.hello import hkdf_expand, hkdf_extract
from farcall.protocol.member import Member
from farcall.runtime.rendezvous.store import STORE_ERRORS, KeyStore
from farcall.secret import Secret

ADD_A_SECRET = (
    f"set the same {ENV_SECRET} (or {ENV_SECRET_FILE}) for every process; make one with "
    "python -c 'import secrets; print(secrets.token_hex(32))'"
)
_KEY_FILE = "key"
_KEY_BYTES = 32
_PROOF_CHARACTERS = 64


def secret_of(options: RpcBackendOptions) -> Secret:
    """The given secret, or one derived from this user's key; raises ``InitError`` if there is neither."""
    given = options.given_secret()
    if given is not None:
        return given
    directory = runtime_directory(options.observing.runtime_directory)
    try:
        key = private_bytes(directory, _KEY_FILE, _KEY_BYTES)
    except OSError as error:
        raise InitError(
            f"no secret was given, and farcall cannot keep a key for this user: {error}; {ADD_A_SECRET}"
        ) from error
    return Secret(hkdf_expand(hkdf_extract(b"farcall user", key), b"secret"))


class _Claim(msgspec.Struct, frozen=True):
    """The claim of a record's writer about itself; used only to name the writer in an error if the proof fails."""

    member: Member
    has_secret: bool


_CLAIM: msgspec.json.Decoder[_Claim] = msgspec.json.Decoder(_Claim)


class Proofs:
    """The proofs of one member's secret at one meeting place."""

    def __init__(self, secret: Secret, is_given: bool, place: str) -> None:
        self._secret = secret
        self._is_given = is_given
        self._place = place
        self._keys: dict[bytes, bytes] = {}  # secret -> the key derived from it; at most two secrets at a time

    def seal(self, key: str, text: str) -> str:
        """``text`` with a proof by each secret that is good now, to store under ``key``."""
        return "".join(self._of(key, text, secret) for secret in self._secret.values) + "\n" + text

    def open(self, key: str, data: bytes) -> bytes:
        """The text of the record ``data`` under ``key``; raises ``WrongSecret``."""
        head, _, text = data.partition(b"\n")
        readable = text.decode("utf-8", "replace")
        ours = [self._of(key, readable, secret).encode() for secret in self._secret.values]
        theirs = [head[:_PROOF_CHARACTERS], head[_PROOF_CHARACTERS:]]
        is_whole = len(head) in (_PROOF_CHARACTERS, 2 * _PROOF_CHARACTERS)
        if not is_whole or not any(hmac.compare_digest(proof, own) for proof in theirs for own in ours):
            raise self._unproved(key, text)
        return text

    def _of(self, key: str, text: str, secret: bytes) -> str:
        proving = self._keys.get(secret)
        if proving is None:
            proving = self._keys[secret] = hkdf_expand(hkdf_extract(b"farcall store", secret), b"record")
        return hmac.digest(proving, f"{key}\n{text}".encode("utf-8", "replace"), "sha256").hex()

    def _unproved(self, key: str, text: bytes) -> WrongSecret:
        who, theirs = f"the writer of the record {key!r}", "another secret"
        try:
            claim = _CLAIM.decode(text)
            who = f"rank {claim.member.rank}, which calls itself {claim.member.name!r},"
            theirs = "another secret" if claim.has_secret else "no secret, on another machine or by another user"
        except (msgspec.DecodeError, UnicodeDecodeError):
            pass
        mine = "a secret" if self._is_given else "none"
        why = f"at {self._place} {who} was given {theirs}, and this process {mine}: {ADD_A_SECRET}"
        if self._secret.path:
            why += (
                "; to join a group that changed its secret meanwhile, name a member: init_method='farcall://host:port'"
            )
        return WrongSecret(why)


_NOTHING = "-"


class Records:
    """A store whose records must be proved. Counters have no proof: a forged one can only speed up or delay."""

    def __init__(self, store: KeyStore, proofs: Proofs) -> None:
        self.store = store
        self.proofs: Proofs = proofs

    def read(self, key: str) -> bytes | None:
        """The record under ``key``, or None. Does not wait for a missing one, as ``get`` would."""
        data = self.read_sealed(key)
        return None if data is None else self.proofs.open(key, data)

    def read_sealed(self, key: str) -> bytes | None:
        """The same, with its proofs, which are not checked."""
        if not self.store.check([key]):
            return None
        try:
            return self.store.get(key)
        except STORE_ERRORS:
            if self.store.check([key]):
                raise
            return None  # deleted between ``check`` and ``get``

    def read_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """The records under ``keys``, or None if one is missing."""
        wanted = list(keys)
        if not self.store.check(wanted):
            return None
        try:
            found = self.store.multi_get(wanted) if self.store.has_extended_api() else list(map(self.store.get, wanted))
        except STORE_ERRORS:
            if self.store.check(wanted):
                raise
            return None  # one was deleted after ``check``
        return [self.proofs.open(key, data) for key, data in zip(wanted, found, strict=True)]

    def there(self, keys: list[str]) -> list[str]:
        """The ``keys`` that exist. Bisects: one request if all exist, few if most do."""
        if self.store.check(keys):
            return keys
        half = len(keys) // 2
        return [*self.there(keys[:half]), *self.there(keys[half:])] if half else []

    def look(self, keys: list[str]) -> dict[str, bytes | WrongSecret]:
        """The existing records under ``keys``; for a record without a valid proof, the error.

        For the time when members give up and delete their records: a ``get`` of a record just deleted would block for
        seconds. A ``compare_set`` against a value that nobody writes does not block, and changes nothing.
        """
        records: dict[str, bytes | WrongSecret] = {}
        for key in self.there(keys):
            data = self.store.compare_set(key, _NOTHING, _NOTHING)
            if data == _NOTHING.encode():
                continue
            try:
                records[key] = self.proofs.open(key, data)
            except WrongSecret as error:
                records[key] = error
        return records

    def write(self, key: str, text: str) -> None:
        """Store a record under ``key``, over whatever it holds."""
        self.store.set(key, self.proofs.seal(key, text))

    def replace(self, key: str, before: str, text: str) -> bytes:
        """Store a record under ``key`` if it holds ``before`` ("": nothing); return what it holds afterwards."""
        sealed_before = b""
        if before:  # with whatever proofs
            sealed_before = self.store.compare_set(key, _NOTHING, _NOTHING)
            if sealed_before == _NOTHING.encode():
                return before.encode()  # just deleted: who asks again learns it
            found = self.proofs.open(key, sealed_before)
            if found.decode() != before:
                return found
        sealed = self.proofs.seal(key, text)
        return self.proofs.open(key, self.store.compare_set(key, sealed_before.decode(), sealed))
