"""Tokens and limits, with the time handed in."""

import pytest

import waker


def refused(attempts: waker.Gate, client: str, now: float) -> str:
    """Attempt once; returns Retry-After, empty if it was let in."""
    try:
        attempts.count(client, now)
    except waker.Fault as fault:
        assert fault.status == 429
        return dict(fault.headers)["Retry-After"]
    return ""


def test_a_token_lives_fifteen_minutes() -> None:
    tokens = waker.Gate()
    token = tokens.issue(1000.0)
    assert tokens.valid(token, 1000.0)
    assert tokens.valid(token, 1899.9)
    assert not tokens.valid(token, 1900.0)


def test_a_token_is_long_new_and_nothing_else_is_one() -> None:
    tokens = waker.Gate()
    token, other = tokens.issue(0), tokens.issue(0)
    assert token != other
    assert len(token) >= 43  # 32 random bytes
    for wrong in ("", token[:-1], token + "x", token.swapcase(), "é"):
        assert not tokens.valid(wrong, 1)


def test_with_too_many_tokens_the_oldest_one_ends() -> None:
    tokens = waker.Gate()
    first, *others = [tokens.issue(now) for now in range(waker.TOKENS + 1)]
    assert not tokens.valid(first, 100)
    assert all(tokens.valid(token, 100) for token in others)


def test_the_eleventh_attempt_in_a_minute_is_refused() -> None:
    attempts = waker.Gate()
    for second in range(10):
        assert not refused(attempts, "192.0.2.1", second)
    assert refused(attempts, "192.0.2.1", 10) == "50"
    assert refused(attempts, "192.0.2.1", 59.5) == "1"
    assert not refused(attempts, "192.0.2.1", 60)  # the first one is a minute old
    assert refused(attempts, "192.0.2.1", 60.5) == "1"
    assert not refused(attempts, "192.0.2.1", 61)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("192.0.2.1", "192.0.2.1", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8:0:1::1", "2001:db8:0:ff:ffff::1", True),
        ("2001:db8:0:1::1", "2001:db8:0:100::1", False),
        ("2001:db8::1", "2001:db9::1", False),
    ],
)
def test_an_ipv4_address_counts_whole_and_an_ipv6_one_by_its_56(
    one: str, other: str, same: bool
) -> None:
    attempts = waker.Gate()
    for _ in range(10):
        attempts.count(one, 0)
    assert bool(refused(attempts, other, 0)) == same


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("192.0.2.1", "192.0.2.1"),
        ("2001:DB8::1", "2001:db8::1"),
    ],
)
def test_an_ipv4_mapped_address_counts_as_ipv4(peer: str, address: str) -> None:
    assert waker.plain_address(peer) == address


def test_strangers_lock_nobody_out_and_fill_no_memory() -> None:
    attempts = waker.Gate()
    for _ in range(10):
        attempts.count("192.0.2.1", 0)
    for number in range(3 * waker.CLIENTS):
        assert not refused(attempts, f"2001:db8:{number:x}::1", 1)
        if number % 1000 == 0:  # who goes on is not forgotten
            assert refused(attempts, "192.0.2.1", 1)
    assert len(attempts._times) == waker.CLIENTS
    assert refused(attempts, "192.0.2.1", 2)
    assert not refused(attempts, "198.51.100.7", 2)


def test_a_dot_in_the_name_of_an_interface_makes_no_ipv4_address() -> None:
    first, second = (waker.counted_as(f"fe80::{n}%eth0.100") for n in (1, 2))
    assert first == second
