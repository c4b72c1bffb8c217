"""The address that a member tells the others."""

from __future__ import annotations

import logging

import pytest

from farcall.runtime.io.timers import NEVER
from farcall.runtime.rendezvous import addresses


def test_the_users_word_comes_first(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "farcall"):
        assert addresses.choose_host("my.host", "127.0.0.1").host == "my.host"
    assert "advertising my.host" in caplog.text


@pytest.mark.parametrize("store_host", ["127.0.0.1", "localhost"])
def test_a_store_on_loopback_gives_loopback(store_host: str) -> None:
    assert addresses.is_loopback(addresses.choose_host(None, store_host).host)


def test_ipv6_loopback_gives_ipv6() -> None:
    if not addresses.is_local("::1"):
        pytest.skip("no IPv6 on this machine")
    assert addresses.choose_host(None, "::1").host == "::1"


def test_the_address_that_reaches_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = {"far": "10.1.2.3", "192.0.2.1": "10.9.9.9"}
    monkeypatch.setattr(addresses, "_leaving_for", routes.get)
    assert addresses.choose_host(None, "far").host == "10.1.2.3"


def test_a_host_name_that_means_loopback_here_gives_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian maps a machine's own name to 127.0.1.1; the others see another address behind it."""
    routes = {"myself": "127.0.1.1", "192.0.2.1": "10.9.9.9"}
    monkeypatch.setattr(addresses, "_leaving_for", routes.get)
    assert addresses.choose_host(None, "myself").host == "10.9.9.9"


def test_a_machine_without_network_gives_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_leaving_for", lambda host: None)
    monkeypatch.setattr(addresses, "_resolve", lambda host: [])
    assert addresses.choose_host(None, None).host == "127.0.0.1"


@pytest.mark.parametrize("store_host", [None, "10.0.0.7"])
def test_a_machine_without_a_way_out_gives_the_address_of_an_interface(
    monkeypatch: pytest.MonkeyPatch, store_host: str | None
) -> None:
    monkeypatch.setattr(addresses, "_near_hosts", lambda: ["127.0.0.1", "10.1.2.1"])
    monkeypatch.setattr(addresses, "_leaving_for", {"127.0.0.1": "127.0.0.1", "10.1.2.1": "10.1.2.3"}.get)
    monkeypatch.setattr(addresses, "_resolve", lambda host: [])
    assert addresses.choose_host(None, store_host).host == "10.1.2.3"


def test_a_network_that_comes_up_late_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks = iter([None, None, None, None, None, "10.1.2.3"])
    monkeypatch.setattr(addresses, "_leaving_for", lambda host: next(looks))
    assert addresses.await_route(["near", "far"], NEVER) == "far"
    assert ["no route leads to near yet" in text for text in caplog.messages] == [True]


def test_a_network_that_does_not_come_up_is_not_waited_for_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_leaving_for", lambda host: None)
    assert addresses.await_route(["far"], 0.0) is None
    assert addresses.await_route([], NEVER) is None, "nobody has to be reached"


def test_loopback_and_a_far_store_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(addresses, "is_local", lambda host: False)
    addresses.choose_host("127.0.0.1", "10.0.0.7")
    assert "FARCALL_ADVERTISE" in caplog.text
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_what_is_listened_on_and_what_is_told() -> None:
    assert addresses.listening_addresses(("tcp",), "10.0.0.1") == ["tcp://*:0"]
    assert addresses.listening_addresses(("tcp",), "::1") == ["tcp://[::1]:0"]
    assert addresses.listening_addresses(("unix", "tcp"), "127.0.0.1") == ["unix:", "tcp://127.0.0.1:0"]
    assert addresses.advertised_address("tcp://*:5", "fd00::1") == "tcp://[fd00::1]:5"
    assert addresses.advertised_address("tcp://127.0.0.1:5", "127.0.0.1") == "tcp://127.0.0.1:5"
    assert addresses.advertised_address("unix:@x", "h") == "unix:@x"
