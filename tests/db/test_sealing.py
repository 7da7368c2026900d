"""Sealed values."""

from __future__ import annotations

import pytest

from services.db.sealing import Sealer, SealError

OLD, NEW = "an-old-key-of-the-installation-000", "a-new-key-of-the-installation-0000"


def test_a_value_opens_at_its_place_and_nowhere_else() -> None:
    sealer = Sealer(OLD)
    sealed = sealer.seal("hunter2 ünïcode", "tenant", "", "token")

    assert sealer.open(sealed, "tenant", "", "token") == "hunter2 ünïcode"
    assert b"hunter2" not in sealed
    for place in (("other", "", "token"), ("tenant", "token", ""), ("tenant", "", "Token")):
        with pytest.raises(SealError):
            sealer.open(sealed, *place)


def test_equal_values_are_sealed_differently() -> None:
    assert Sealer(OLD).seal("x", "here") != Sealer(OLD).seal("x", "here")


@pytest.mark.parametrize("at", [0, 1, 5, 13, -1])
def test_a_changed_byte_is_noticed(at: int) -> None:
    sealed = bytearray(Sealer(OLD).seal("hunter2", "here"))
    sealed[at] ^= 1
    with pytest.raises(SealError):
        Sealer(OLD).open(bytes(sealed), "here")


@pytest.mark.parametrize("sealed", [b"", b"\x01", b"\x01" + bytes(12)])
def test_what_was_never_sealed_does_not_open(sealed: bytes) -> None:
    with pytest.raises(SealError):
        Sealer(OLD).open(sealed, "here")


def test_a_key_is_replaced_by_putting_a_new_one_before_it() -> None:
    sealed = Sealer(OLD).seal("hunter2", "here")
    both = Sealer(f"{NEW}, {OLD}")

    assert both.open(sealed, "here") == "hunter2"
    assert Sealer(NEW).open(both.seal("again", "here"), "here") == "again"
    with pytest.raises(SealError):
        Sealer(NEW).open(sealed, "here")
    assert not Sealer("").has_key
