"""The passphrase, the PIN and the tokens, looked for wherever they must not be."""

import os
import signal
import threading
from pathlib import Path

from conftest import PIN, daemon, new_app
from cryptroot_unlock import Disks
from ssh_servers import paramiko_server
from test_daemon import MAC, wait_for, wait_for_child

import waker

SECRET = "the-secret-passphrase"


def everything_told(pid: int | str) -> bytes:
    """Read what any other process may read of one: its arguments, its environment."""
    proc = Path(f"/proc/{pid}")
    return (proc / "cmdline").read_bytes() + (proc / "environ").read_bytes()


def test_no_secret_is_where_others_could_read_it(tmp_path: Path) -> None:
    with paramiko_server(tmp_path, Disks({"d": SECRET}, slow=1)) as initrd:
        settings = initrd.machine().settings()
        with daemon(settings | MAC) as started:
            client = started.client
            for pin in ("a-wrong-pin", PIN):
                client.call("POST", "/api/auth", {"pin": pin})
            client.log_in()
            answers = []

            def unlock(passphrase: str) -> None:
                body = {"passphrase": passphrase}
                answers.append(client.call("POST", "/api/unlock", body))

            thread = threading.Thread(target=unlock, args=(SECRET,))
            thread.start()
            child = wait_for_child(started.process.pid)
            wait_for(initrd.received)
            of_child = everything_told(child)
            thread.join()
            unlock(SECRET + "\n")
            client.call("POST", f"/api/unlock?{SECRET}", b"not JSON " + SECRET.encode())
            of_daemon = everything_told(started.process.pid)
            assert started.stop() == 0
    log = "\n".join(started.log).encode()
    told = b"".join(answer.body for answer in answers)
    assert answers[0].status == 200
    for secret in (SECRET, client.token):
        assert secret.encode() not in of_child + of_daemon + log + told
    assert PIN.encode() not in of_child + log
    assert b"a-wrong-pin" not in log
    assert PIN.encode() in of_daemon  # the environment that the user put it into


def test_no_secret_is_in_a_repr(config: waker.Config) -> None:
    app = new_app(config)
    token = app.gate.issue(0)
    request = waker.Request(
        "POST", "/api/unlock", "192.0.2.1", 0, token=token, body=SECRET.encode()
    )
    objects = (
        app,
        request,
        config,
        config.pin,
        app.gate,
        app.gate,
        waker.Passphrase(SECRET),
        waker.Response({"token": token}),
    )
    for text in map(repr, objects):
        assert token not in text
        assert SECRET not in text
        assert PIN not in text
        assert waker.sha256(PIN.encode()).hex() not in text
        assert repr(waker.sha256(PIN.encode())) not in text


def test_no_core_is_dumped(tmp_path: Path) -> None:
    with paramiko_server(tmp_path, Disks({"d": SECRET}, slow=1)) as initrd:
        with daemon(initrd.machine().settings() | MAC) as started:
            client = started.client.log_in()
            thread = threading.Thread(
                target=client.call, args=("POST", "/api/unlock", {"passphrase": SECRET})
            )
            thread.start()
            child = wait_for_child(started.process.pid)
            wait_for(initrd.received)
            for pid in (child, started.process.pid):
                limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
                (line,) = [limit for limit in limits if "core file" in limit]
                assert line.split()[4:6] == ["1", "1"]  # not 0: see main()
            os.kill(child, signal.SIGKILL)
            thread.join()
