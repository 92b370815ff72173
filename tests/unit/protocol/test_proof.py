"""Proofs of secrets, each of which counts once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.protocol.proof import PROOF_NBYTES, Secrets, proof_of

SECRET = "0123456789abcdef"


@pytest.fixture
def known() -> Secrets:
    known = Secrets()
    for secret in (SECRET, "another"):
        known.add(secret)
    return known


def test_a_proof_says_which_secret_it_is_of_and_does_not_contain_it(known: Secrets) -> None:
    proof = proof_of(SECRET)
    assert known.proven(proof) == SECRET
    assert known.proven(proof_of("another")) == "another"
    assert len(proof) == PROOF_NBYTES
    assert SECRET.encode() not in proof


def test_a_secret_of_random_bytes_is_proven(known: Secrets) -> None:
    """As Python reads such a variable of the environment."""
    known.add(secret := bytes(range(1, 256)).decode(errors="surrogateescape"))
    assert known.proven(proof_of(secret)) == secret


def test_a_proof_that_was_recorded_is_of_no_use(known: Secrets) -> None:
    proof = proof_of(SECRET)
    assert known.proven(proof)
    assert not known.proven(proof)
    assert known.proven(proof_of(SECRET)), "who knows the secret dials again"


def test_an_unknown_secret_proves_nothing(known: Secrets) -> None:
    assert not known.proven(proof_of("guess"))
    assert not known.proven(proof_of(SECRET)[:32] + proof_of("another")[32:])


@given(st.binary(max_size=PROOF_NBYTES + 2))
def test_other_bytes_prove_nothing(data: bytes) -> None:
    known = Secrets()
    known.add(SECRET)
    assert not known.proven(data)


@given(st.integers(0, PROOF_NBYTES - 1), st.integers(1, 255))
def test_a_proof_that_was_changed_is_none(place: int, change: int) -> None:
    known, proof = Secrets(), bytearray(proof_of(SECRET))
    known.add(SECRET)
    proof[place] ^= change
    assert not known.proven(bytes(proof))
