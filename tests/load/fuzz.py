"""The daemon against its description: requests that fit docs/openapi.yaml, or do not.

schemathesis makes the requests and judges the answers, with all of its checks. It loads
this file as well, for its hook.
"""

import itertools
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import schemathesis
from conftest import CHECKOUT, daemon
from machine import CLOSED, Machine

SETTINGS = {
    "PIN": "choose-your-own",  # the description's, so that some requests log in
    "TRUSTED_PROXY": "127.0.0.1",
}
# By default, schemathesis accepts any 401 or 500 as the refusal of a bad body. Here a
# bad body must be reported as bad. Only a failed unlock may answer 500; the description
# has its texts.
CONFIG = """
hooks = "fuzz"
continue-on-failure = true
generation.database = "none"
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
    """Send it as the next client: each may try ten PINs a minute."""
    case.headers["X-Forwarded-For"] = next(CLIENTS)
    for name in ("Content-Length", "Transfer-Encoding"):  # made up, they fit no body
        case.headers.pop(name, None)


def test_it_does_what_its_description_says(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    machine.show(CLOSED, CLOSED)  # so an unlock fails at once
    with ThreadPoolExecutor() as pool, daemon(machine.settings(**SETTINGS)) as started:
        client = started.client.log_in(SETTINGS["PIN"])
        assert started.process.stderr
        log = pool.submit(list, started.process.stderr)  # or the pipe becomes full
        command = [sys.executable, "-m", "schemathesis.cli", "run", "--checks", "all"]
        command += [str(CHECKOUT / "docs/openapi.yaml")]
        command += ["--url", f"http://127.0.0.1:{client.port}"]
        limits = "--seed", os.environ["SEED"], "--max-examples", os.environ["EXAMPLES"]
        env = os.environ | {"PYTHONPATH": ":".join(sys.path), "TOKEN": client.token}
        subprocess.run([*command, *limits], cwd=tmp_path, env=env, check=True)
        client.status()  # the token is alive, so what is behind it was tested
        started.process.terminate()
        assert started.process.wait() == 0
    assert not [x for x in log.result() if re.search("bug:|Traceback|[^ -~\n]", x)]
