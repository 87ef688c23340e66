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
README = CHECKOUT.joinpath("README.md").read_text()

Definition = ast.FunctionDef | ast.ClassDef


def test_it_is_built_on_http_server_and_needs_only_paramiko_besides() -> None:
    assert issubclass(waker.Server, http.server.ThreadingHTTPServer)
    imports = [n for n in ast.walk(TREE) if isinstance(n, ast.Import | ast.ImportFrom)]
    modules = {re.split("[ .]", ast.unparse(node))[1] for node in imports}
    assert modules - sys.stdlib_module_names == {"paramiko", "cryptography"}


OPENS = r"(?<!tls)\.open\(|(?<![.\w])(?<!def )open\(|\b(read|write)_(text|bytes)\("
NETWORK = r"socket\.(socket|create_\w+|getaddrinfo)\(|\.connect\(\(|sendto\("
READERS = "FileKind read_env_file is_public_half load_key load_page"


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        (NETWORK, "open_tcp find_source wake listen"),
        (rf"{OPENS}|key_file\(", f"{READERS} check_certificate check_mac main"),
        (r"subprocess\.\w+\(|os\.(system|exec|spawn|fork)", "Unlocker"),
        (r"environ\b|getenv|sys\.std", "main"),
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


def test_the_program_its_descriptions_and_its_units_agree() -> None:
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
    unit = CHECKOUT.joinpath("waker.service").read_text()
    values = dict(re.findall(r"(?m)^(\w+)=(.*)$", unit))
    assert values["RestartPreventExitStatus"] == str(os.EX_CONFIG)
    stop = values["TimeoutStopSec"]
    assert int(stop) > waker.Config._field_defaults["unlock_seconds"]
    assert f"term_timeout {stop} " in CHECKOUT.joinpath("waker.init").read_text()
    names = re.findall(r"LoadCredential=(.*):/etc/waker/\1\n", unit)
    handed_over = ", ".join(f"`{name}`" for name in names[:-1])
    assert f"can read only {handed_over} and `{names[-1]}` in `/etc/waker`" in README
    changes = CHECKOUT.joinpath("CHANGELOG.md").read_text()
    assert re.findall("(?m)^## (.*)$", changes)[0] == waker.__version__
