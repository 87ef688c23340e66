"""Tokens and limits, with the time handed in."""

import itertools

import pytest

import waker

PIN = waker.Pin.parse("246810")


def refused(gate: waker.Gate, client: str, now: float) -> str:
    """Attempt once; returns Retry-After, empty if it was let in."""
    try:
        gate.attempt(client, now)
    except waker.Fault as fault:
        assert fault.status == 429
        return dict(fault.headers)["Retry-After"]
    return ""


def test_a_token_lives_fifteen_minutes() -> None:
    tokens = waker.Tokens()
    token = tokens.issue(1000.0)
    assert tokens.valid(token, 1000.0)
    assert tokens.valid(token, 1899.9)
    assert not tokens.valid(token, 1900.0)


def test_a_token_is_long_new_and_nothing_else_is_one() -> None:
    tokens = waker.Tokens()
    token, other = tokens.issue(0), tokens.issue(0)
    assert token != other
    assert len(token) >= 43  # 32 random bytes
    for wrong in ("", token[:-1], token + "x", token.swapcase(), "é"):
        assert not tokens.valid(wrong, 1)


def test_with_too_many_tokens_the_oldest_one_ends() -> None:
    tokens = waker.Tokens()
    first, *others = [tokens.issue(now) for now in range(waker.TOKENS + 1)]
    assert not tokens.valid(first, 100)
    assert all(tokens.valid(token, 100) for token in others)


def test_the_eleventh_attempt_in_a_minute_is_refused() -> None:
    gate = waker.Gate(PIN)
    for second in range(10):
        assert not refused(gate, "192.0.2.1", second)
    assert refused(gate, "192.0.2.1", 10) == "50"
    assert refused(gate, "192.0.2.1", 59.5) == "1"
    assert not refused(gate, "192.0.2.1", 60)  # the first one is a minute old
    assert refused(gate, "192.0.2.1", 60.5) == "1"
    assert not refused(gate, "192.0.2.1", 61)


def test_each_ipv4_address_counts_for_itself() -> None:
    gate = waker.Gate(PIN)
    for _ in range(10):
        gate.attempt("192.0.2.1", 0)
    assert refused(gate, "192.0.2.1", 0)
    assert not refused(gate, "192.0.2.2", 0)


def test_ipv6_addresses_count_by_their_64() -> None:
    gate = waker.Gate(PIN)
    for host in range(10):
        gate.attempt(f"2001:db8:0:1::{host:x}", 0)
    assert refused(gate, "2001:db8:0:1:ffff:ffff:ffff:ffff", 0)
    assert not refused(gate, "2001:db8:0:2::1", 0)


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("192.0.2.1", "192.0.2.1"),
        ("2001:DB8::1", "2001:db8::1"),
    ],
)
def test_an_ipv4_address_in_ipv6s_clothes_is_itself(peer: str, address: str) -> None:
    assert waker.plain_address(peer) == address


def test_a_flood_of_addresses_neither_grows_the_table_nor_frees_its_author() -> None:
    gate = waker.Gate(PIN)
    for _ in range(10):
        gate.attempt("192.0.2.1", 0)
    flood = [f"2001:db8:{number:x}::1" for number in range(3 * waker.ADDRESSES)]
    let_in = sum(not refused(gate, address, 1) for address in flood)
    assert let_in == waker.ADDRESSES - 1 + waker.ATTEMPTS  # the rest count as one
    assert len(gate._attempts) == waker.ADDRESSES + 1
    assert refused(gate, "192.0.2.1", 2)
    assert not refused(gate, "198.51.100.7", 62)  # the flood is over, and forgotten
    assert len(gate._attempts) == 1


def test_sixty_wrong_pins_an_hour_from_everywhere_are_the_end() -> None:
    gate = waker.Gate(PIN)
    seconds = itertools.count()
    for _ in range(60):
        assert not gate.admits("wrong!", next(seconds))
    with pytest.raises(waker.Fault) as told:
        gate.admits("246810", next(seconds))
    assert told.value.status == 429
    text = "Too many wrong PINs from everywhere; try again in "
    assert str(told.value).startswith(text)
    assert dict(told.value.headers)["Retry-After"] == "3540"
    assert gate.admits("246810", 3600)


def test_right_pins_are_not_counted_as_wrong() -> None:
    gate = waker.Gate(PIN)
    assert all(gate.admits("246810", 0) for _ in range(100))
