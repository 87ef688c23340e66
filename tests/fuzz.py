"""The daemon against its own description, with whatever fits tests/openapi.yaml or not.

schemathesis makes the requests and judges the answers, with all of its checks:

    python3 -m pytest tests/fuzz.py [--examples N] [--hypothesis-seed N]

It loads this file as well, for what neither its options nor its configuration can say:
the hook. The machine refuses connections, so that an unlock fails at once.
"""

import itertools
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from conftest import MACHINE, daemon
from homelab import new_key, public_line

HERE = Path(__file__).parent
PIN = "choose-your-own"  # the description's example, so that some requests log in
SETTINGS = MACHINE | {
    "WAKER_PIN": PIN,
    "WAKER_HOMELAB_BROADCAST": "127.0.0.1",
    "WAKER_INITRD_SSH_PORT": "1",  # nobody listens there, so an unlock fails at once
    "WAKER_SYSTEM_SSH_PORT": "2",
    "WAKER_SSH_HOST_KEY": public_line(new_key()),
    "WAKER_TRUSTED_PROXY": "127.0.0.1",
}
ODD = "bug:|Traceback|[^ -~\n]"  # in a line of the log

# By itself schemathesis takes any 401 or 500 for the refusal of a body; here one that
# is not right must be called so. "Failed to unlock" is the one 500 that is no bug; the
# description has its text.
CONFIG = """
hooks = "fuzz"
auth.openapi.token.bearer = "${TOKEN}"
checks.negative_data_rejection.expected-statuses = [400, 401, 413, 415]

[[operations]]
include-operation-id = "postAuth"
checks.negative_data_rejection.expected-statuses = [400, 413, 415]

[[operations]]
include-operation-id = "postUnlock"
checks.not_a_server_error.expected-statuses = ["4xx", 200, 500]
"""
CLIENTS = itertools.cycle(f"10.0.{n // 250}.{n % 250}" for n in range(1000))


@schemathesis.hook
def before_call(_: object, case: Any, __: object) -> None:
    """Have the next client ask: each may make ten attempts at the PIN in a minute."""
    case.headers["X-Forwarded-For"] = next(CLIENTS)


def test_it_does_what_its_description_says(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    new_key().write_private_key_file(str(tmp_path / "ssh_key"))
    config = tmp_path / "schemathesis.toml"
    config.write_text(CONFIG)
    settings = SETTINGS | {"WAKER_SSH_KEY": str(tmp_path / "ssh_key")}
    with daemon(settings) as started:
        client, lines = started.client.log_in(PIN), started.process.stderr
        assert lines
        log: list[str] = []
        reader = threading.Thread(target=lambda: log.extend(lines))
        reader.start()
        command = [sys.executable, "-m", "schemathesis.cli", "--config-file"]
        command += [str(config), "run", str(HERE / "openapi.yaml"), "--checks", "all"]
        command += ["--url", f"http://127.0.0.1:{client.port}"]
        command += ["--seed", str(pytestconfig.getoption("--hypothesis-seed"))]
        command += ["--max-examples", str(pytestconfig.getoption("--examples"))]
        command += ["--continue-on-failure", "--generation-database", "none"]
        env = os.environ | {
            "PYTHONPATH": str(HERE),
            "TOKEN": client.token,
        }
        run = subprocess.run(command, cwd=tmp_path, env=env, check=False)
        client.status()  # the token is alive, so what is behind it was tested
        started.process.terminate()
        reader.join()
    assert run.returncode == started.process.wait() == 0
    assert not [line for line in log if re.search(ODD, line)]
