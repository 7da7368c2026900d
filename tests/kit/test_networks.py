"""Networks that a process may connect to."""

import pytest

from services.kit.networks import is_within, read_networks

ALLOWED = read_networks("10.8.0.0/16, 192.0.2.7,fd00::/8")


@pytest.mark.parametrize("address", ["10.8.255.1", "192.0.2.7", "fd12::1", "::ffff:10.8.0.1", "fd12::1%eth0"])
def test_an_address_of_a_named_network_is_allowed(address: str) -> None:
    assert is_within(address, ALLOWED)


@pytest.mark.parametrize("address", ["10.9.0.1", "192.0.2.8", "127.0.0.1", "::1", "169.254.169.254", "::ffff:10.9.0.1"])
def test_every_other_address_is_refused(address: str) -> None:
    assert not is_within(address, ALLOWED)


def test_without_networks_nothing_is_allowed() -> None:
    assert not is_within("127.0.0.1", read_networks(""))


@pytest.mark.parametrize("text", ["10.8.0.1/16", "example.org", "10.0.0.0/33"])
def test_what_is_no_network_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="must be networks such as"):
        read_networks(text)
