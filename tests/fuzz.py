"""The daemon against its own description, with whatever fits tests/openapi.yaml or not.

schemathesis makes the requests and judges the answers, with all of its checks:

    python3 tests/fuzz.py [--examples N] [--seed N]

It ends with status 1 if a check fails, if the daemon dies, or if its log tells of a bug
or has a byte that is no printable ASCII. The machine refuses connections, so that an
unlock fails at once.

schemathesis loads this file as well, for what neither its options nor its configuration
can say: the hook at the end.
"""

import argparse
import importlib
import itertools
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conftest import Client, daemon
from homelab import new_key, public_line

HERE = Path(__file__).resolve().parent
PIN = "choose-your-own"  # the description's example, so that some requests log in
SETTINGS = {
    "WAKER_PIN": PIN,
    "WAKER_HOMELAB_MAC": "52:54:00:12:34:56",
    "WAKER_HOMELAB_HOST": "127.0.0.1",
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
auth.openapi.token.bearer = "{token}"
checks.negative_data_rejection.expected-statuses = [400, 401, 413, 415]
generation.max-examples = {examples}

[[operations]]
include-operation-id = "postAuth"
checks.negative_data_rejection.expected-statuses = [400, 413, 415]

[[operations]]
include-operation-id = "postUnlock"
checks.not_a_server_error.expected-statuses = ["4xx", 200, 500]
"""


def run_schemathesis(client: Client, folder: Path, examples: int, seed: int) -> int:
    """Let it test the daemon; returns its exit status."""
    config = folder / "schemathesis.toml"
    config.write_text(CONFIG.format(token=client.token, examples=examples))
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config)]
    command += ["run", str(HERE / "openapi.yaml"), "--checks", "all"]
    command += ["--url", f"http://{client.host}:{client.port}"]
    command += ["--seed", str(seed), "--continue-on-failure"]
    command += ["--generation-database", "none", "--request-timeout", "30"]
    env = os.environ | {"PYTHONPATH": str(HERE)}  # where it finds this file
    return subprocess.run(command, cwd=folder, env=env, check=False).returncode


def fuzz(folder: Path, examples: int, seed: int) -> Iterator[str]:
    """Test a daemon; yields what is wrong."""
    key = folder / "ssh_key"
    new_key().write_private_key_file(str(key))
    with daemon(SETTINGS | {"WAKER_SSH_KEY": str(key)}) as started:
        client, lines = started.client.log_in(PIN), started.process.stderr
        assert lines
        log: list[str] = []
        reader = threading.Thread(target=lambda: log.extend(lines))
        reader.start()
        if run_schemathesis(client, folder, examples, seed):
            yield "schemathesis found something"
        if client.call("GET", "/api/status").status != 200:
            yield "the token had ended, so nothing behind it was tested any more"
        started.process.terminate()
        reader.join()
    if started.process.returncode:
        yield f"the daemon ended with status {started.process.returncode}"
    yield from (f"an odd line in the log: {x!r}" for x in log if re.search(ODD, x))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--examples", type=int, default=200, help="for each operation")
    parser.add_argument("--seed", type=int, default=1, help="of what is random")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        faults = list(fuzz(Path(name), arguments.examples, arguments.seed))
    print(*faults or ["The daemon does what its description says."], sep="\n")
    return 1 if faults else 0


CLIENTS = itertools.cycle(f"10.0.{n // 250}.{n % 250}" for n in range(1000))


def come_from_elsewhere(_: object, case: Any, __: object) -> None:
    """Have the next client ask: each may make ten attempts at the PIN in a minute."""
    case.headers["X-Forwarded-For"] = next(CLIENTS)


if __name__ == "__main__":
    sys.exit(main())
else:
    importlib.import_module("schemathesis").hook("before_call")(come_from_elsewhere)
