"""Today's Debian unstable with dracut, set up as docs/server.md says for Fedora.

Only `make test-unstable` runs this, since unstable may be broken for other reasons.
"""

from pathlib import Path

from computer import computer_of, waker_on
from conftest import PASSPHRASE
from guests import UNSTABLE, make_unstable


def test_a_server_with_debian_unstable_and_dracut_is_unlocked(tmp_path: Path) -> None:
    make_unstable()
    with (
        computer_of(UNSTABLE.hardware(), tmp_path) as computer,
        waker_on(computer.router, UNSTABLE.settings()) as owner,
    ):
        owner.wait_for("off")
        start = owner.start("wrong", computer.listen)
        assert start["outcome"] == "wrong_passphrase", start
        assert [owner.unlock("wrong")[0] for _ in range(3)] == [400] * 3
        start = owner.start(PASSPHRASE)
        assert start["message"] == "The system is up. Unlocked: cryptroot.", start
        computer.wait_for("guest login:")
