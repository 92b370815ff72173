"""How a process that dials shows a secret: by a proof, which a listener accepts once.

A process that records a proof learns no secret, and cannot use the proof again.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

_NAME_NBYTES, _NONCE_NBYTES = 16, 16
PROOF_NBYTES = _NAME_NBYTES + _NONCE_NBYTES + hashlib.sha256().digest_size


def proof_of(secret: str) -> bytes:
    """Return a new proof of `secret`."""
    nonce = secrets.token_bytes(_NONCE_NBYTES)
    return _name(secret) + nonce + _sign(secret, nonce)


class Secrets:
    """The secrets that a listener accepts."""

    def __init__(self) -> None:
        self._by_name: dict[bytes, str] = {}
        self._used: set[bytes] = set()

    def add(self, secret: str) -> None:
        """Accept proofs of `secret` from now on."""
        self._by_name[_name(secret)] = secret

    def proven(self, proof: bytes) -> str:
        """Return the secret of `proof`, "" if there is none or the proof was used before."""
        head = _NAME_NBYTES + _NONCE_NBYTES
        name, nonce, signature = proof[:_NAME_NBYTES], proof[_NAME_NBYTES:head], proof[head:]
        secret = self._by_name.get(name, "")
        if not secret or not hmac.compare_digest(signature, _sign(secret, nonce)) or proof in self._used:
            return ""
        self._used.add(proof)
        return secret


def _name(secret: str) -> bytes:
    return hashlib.sha256(_bytes(secret)).digest()[:_NAME_NBYTES]


def _sign(secret: str, nonce: bytes) -> bytes:
    return hmac.digest(_bytes(secret), nonce, "sha256")


def _bytes(secret: str) -> bytes:
    return secret.encode(errors="surrogateescape")  # a token of the environment may be no text
