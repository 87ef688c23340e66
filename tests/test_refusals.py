"""What `prepare.py` refuses before it changes anything."""

import subprocess

from conftest import wait_for
from simulated import KEY, PROGRAM, Server

LOCK = "/run/waker-prepare.lock"
# The first build waits until its folder is gone.
WAITS = "! mkdir $here/builds || while [ -e $here/builds ]; do sleep 0.05; done"


# ---- One run at a time ----


def test_a_second_run_is_refused_while_one_is_at_work(server: Server) -> None:
    """Whatever either of them does. Only root can open the lock, and undo leaves it."""
    for arguments in (f"--yes '{KEY}'", "--yes --undo"):
        server.spoil(WAITS)
        command = server.enter(f"exec env {PROGRAM} {arguments}")
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
            wait_for((server.folder / "builds").exists)
            before = server.files()
            for others in (f"--yes '{KEY}'", "--yes --undo"):
                said = server.prepare(others, check=False)
                assert said.startswith("Nothing was changed on this server: `waker pr")
                assert said.endswith(f" end it there as root: kill {first.pid}\n")
            assert server.files() == before
            (server.folder / "builds").rmdir()
            assert "The initrd of each kernel was examined." in first.communicate()[0]
            assert first.returncode == 0
        assert server.run(f"stat -c %a {LOCK}") == "600\n"
    server.spoil("")
    assert "The server is prepared." in server.prepare()
