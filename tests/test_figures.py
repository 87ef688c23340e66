"""Figures that README and docs promise, as numbers.

A test that compares with the program's own constant cannot notice that it changed.
"""

import pytest

import waker


@pytest.mark.parametrize(
    ("figure", "promised"),
    [
        ("packet_port", 9),
        ("unlock_seconds", 90),
        ("packet_seconds", 10),
        ("retry_seconds", 5),
        ("prompt_seconds", 120),
        ("doubt_seconds", 45),
        ("start_seconds", 600),
    ],
)
def test_a_start_takes_as_long_as_promised(figure: str, promised: float) -> None:
    assert waker.Config._field_defaults[figure] == promised


@pytest.mark.parametrize(
    ("figure", "promised"),
    [
        ("PROBE_SECONDS", 0.8),
        ("LOST_SECONDS", 10),
        ("HANDSHAKE_SECONDS", 10),
        ("PROMPT_SECONDS", 60),
        ("NEXT_PROMPT_SECONDS", 15),
        ("MAX_DISKS", 16),
        ("MAX_OUTPUT", 1024 * 1024),
        ("SHOWN_SECONDS", 3600),
        ("TOKEN_SECONDS", 900),
        ("MAX_TOKENS", 64),
        ("MAX_ATTEMPTS", 10),
        ("ATTEMPT_SECONDS", 60),
        ("MAX_CLIENTS", 4096),
        ("MAX_HEAD", 16384),
        ("MAX_FIELDS", 100),
        ("MAX_BODY", 16384),
        ("MAX_CONNECTIONS", 64),
        ("CLIENT_SECONDS", 10),
        ("DRAIN_SECONDS", 2),
        ("MAX_MEMORY", 64 * 1024 * 1024),
        ("MAX_LOG_LINE", 1000),
    ],
)
def test_a_limit_is_as_promised(figure: str, promised: float) -> None:
    assert getattr(waker, figure) == promised


def test_an_unlock_by_hand_has_90_seconds() -> None:
    assert waker.parse_arguments(["unlock"]).seconds == 90
