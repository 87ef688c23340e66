"""What waker.py may touch; and whether README, openapi.yaml and the units agree."""

import ast
import http.server
import os
import re
import sys
from pathlib import Path

import pytest
import yaml
from conftest import CHECKOUT, PROGRAM

import waker

SOURCE = Path(PROGRAM).read_text()
TREE = ast.parse(SOURCE)
Definition = ast.FunctionDef | ast.ClassDef


def test_it_is_built_on_http_server_and_needs_only_paramiko_besides() -> None:
    assert issubclass(waker.Server, http.server.ThreadingHTTPServer)
    imports = [n for n in ast.walk(TREE) if isinstance(n, ast.Import | ast.ImportFrom)]
    modules = {re.split("[ .]", ast.unparse(node))[1] for node in imports}
    assert modules - sys.stdlib_module_names == {"paramiko"}


def test_an_old_python_is_reported_before_anything_else() -> None:
    tree = ast.parse(SOURCE, feature_version=(3, 8))
    assert ast.unparse(tree.body[1]) == "import sys"
    check = tree.body[2]
    assert isinstance(check, ast.If)
    assert ast.unparse(check.test) == "sys.version_info < (3, 11)"
    assert "needs Python 3.11 or later" in ast.unparse(check.body[0])


OPENS = r"(?<![.\w])(?<!def )open\(|\b(read|write)_(text|bytes)\(|key_file\("
KEYS = "find_key_problem load_key"
NETWORK = r"socket\.(socket|create_\w+|getaddrinfo)\(|\.connect\(\(|sendto\("


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        (NETWORK, "open_tcp find_source wake listen"),
        (OPENS, f"{KEYS} read_env_file Page check_ports_and_mac read_passphrase"),
        (r"\bPopen\(|subprocess\.\w+\(|os\.(system|exec|spawn|fork)", "Unlocker"),
        (r"environ\b|getenv|sys\.std", "run_command"),
    ],
    ids=["network", "files", "processes", "environment"],
)
def test_only_these_functions_touch(pattern: str, names: str) -> None:
    users = {
        node.name if isinstance(node, Definition) else ast.unparse(node)
        for node in TREE.body
        if re.search(pattern, ast.unparse(node))
    }
    assert users == set(names.split())


def test_the_routes_are_those_that_are_described() -> None:
    routes = {(method, path): is_open for method, path, _, is_open in waker.ROUTES}
    api = yaml.safe_load(CHECKOUT.joinpath("tests/openapi.yaml").read_text())
    described = {
        (method.upper(), path): "security" not in operation
        for path, operations in api["paths"].items()
        for method, operation in operations.items()
        if method != "head"
    }
    assert described == routes
    page = CHECKOUT.joinpath("docs/api.md").read_text()
    table = page.split("| request | answer |")[1].split("\n\n")[0]
    assert set(re.findall(r"`([A-Z]+) (/\S*?)`", table)) == set(routes)


def test_the_program_and_its_units_agree() -> None:
    unit = CHECKOUT.joinpath("waker.service").read_text()
    values = dict(re.findall(r"(?m)^(\w+)=(.*)$", unit))
    assert values["RestartPreventExitStatus"] == str(os.EX_CONFIG)
    stop = values["TimeoutStopSec"]
    # A process that unlocks is killed five seconds after its time.
    assert int(stop) > waker.UNLOCK_SECONDS + 5
    assert f"term_timeout {stop} " in CHECKOUT.joinpath("waker.init").read_text()
    passed = re.findall(r"(?m)^LoadCredential=(.*):/etc/waker/\1$", unit)
    assert (
        passed == ["waker.env", "ssh_key"] == re.findall("SetCredential=(.*?):", unit)
    )
    readme = " ".join(CHECKOUT.joinpath("README.md").read_text().split())
    assert "can read only `waker.env` and `ssh_key` in `/etc/waker`" in readme


def test_the_newest_change_has_the_programs_version() -> None:
    changes = CHECKOUT.joinpath("CHANGELOG.md").read_text()
    assert re.findall("(?m)^## (.*)$", changes)[0] == waker.__version__
