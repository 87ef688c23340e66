"""Today's Debian unstable with dracut, as docs/initrds.md says: what comes next.

It runs by `make test-unstable` alone: it is not waker's fault if unstable is broken.
"""

from pathlib import Path

from computer import computer_of, owner_of
from conftest import PASSPHRASE
from guests import UNSTABLE, make_unstable


def test_a_server_with_debian_unstable_and_dracut_is_unlocked(tmp_path: Path) -> None:
    make_unstable()
    with computer_of(UNSTABLE, tmp_path) as computer, owner_of(computer) as owner:
        owner.wait_for("off")
        told = owner.start("wrong", computer.hear)
        assert told["outcome"] == "wrong_passphrase", told
        assert [owner.unlock("wrong")[0] for _ in range(3)] == [400] * 3
        told = owner.start(PASSPHRASE)
        assert told["message"] == "Unlocked: cryptroot. The system is up.", told
        computer.wait_for("guest login:")
