"""The form of waker.py, and that README, openapi.yaml and the units say the same."""

import ast
import http.server
import os
import re
import sys
from pathlib import Path

import pytest
import yaml
from breaks import BREAKS, Break
from conftest import CHECKOUT, PROGRAM

import waker

SOURCE = Path(PROGRAM).read_text()
TREE = ast.parse(SOURCE)
README = CHECKOUT.joinpath("README.md").read_text()

Definition = ast.FunctionDef | ast.ClassDef
Value = ast.AnnAssign | ast.Assign
NODES = list(ast.walk(TREE))
CLASSES = [node for node in TREE.body if isinstance(node, ast.ClassDef)]
VALUES = [node for node in TREE.body if isinstance(node, Value)]


def stored(node: ast.AST) -> set[str]:
    """Tell which names a statement gives a value to, arguments included."""
    names = {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
    for inside in ast.walk(node):
        if isinstance(inside, ast.Name) and isinstance(inside.ctx, ast.Store):
            names.add(inside.id)
    return names


def test_it_is_built_on_http_server_and_needs_only_paramiko_besides() -> None:
    assert issubclass(waker.Server, http.server.ThreadingHTTPServer)
    imports = [n for n in NODES if isinstance(n, ast.Import | ast.ImportFrom)]
    modules = {re.split("[ .]", ast.unparse(node))[1] for node in imports}
    assert modules - sys.stdlib_module_names == {"paramiko", "cryptography"}


def test_a_name_or_a_method_is_made_before_it_is_used() -> None:
    made = {n.name: n.lineno for n in TREE.body if isinstance(n, Definition)}
    made |= {name: value.lineno for value in VALUES for name in stored(value)}
    for statement in TREE.body:
        inside = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
        read = {node.id for node in inside} - stored(statement)
        later = {name for name in read if made.get(name, 0) > statement.lineno}
        assert not later, statement.lineno
    for kind in CLASSES:
        methods = [node for node in kind.body if isinstance(node, ast.FunctionDef)]
        for number, method in enumerate(methods):
            calls = set(re.findall(r"\bself\.(\w+)", ast.unparse(method)))
            assert not calls & {later.name for later in methods[number + 1 :]}


def test_nothing_at_module_level_can_change() -> None:
    assert not [node for node in NODES if isinstance(node, ast.Global)]
    for name in {name for value in VALUES for name in stored(value)} & {*vars(waker)}:
        hash(getattr(waker, name))  # lists, sets and dictionaries have none
    calls = [n for value in VALUES for n in ast.walk(value) if isinstance(n, ast.Call)]
    made_by = {ast.unparse(call.func) for call in calls}
    assert made_by == {
        "functools.partial",
        "NewType",
        "Dialect",
        "FileKind",
        "re.compile",
    }
    constant = ast.Constant | ast.Name | ast.Attribute | ast.Tuple
    for kind in CLASSES:
        for statement in kind.body:  # nor a value that all of a kind share
            if isinstance(statement, Value) and statement.value:
                assert isinstance(statement.value, constant), kind.name


OPENS = r"(?<!tls)\.open\(|(?<![.\w])(?<!def )open\(|\b(read|write)_(text|bytes)\("
NETWORK = r"socket\.(socket|create_\w+|getaddrinfo)\(|\.connect\(\(|sendto\("
READERS = "FileKind read_env_file is_public_half load_key load_page"
CLOCKED = "probe_port Command Session unlock Unlocker Starter Connection read_request"


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        (NETWORK, "open_tcp find_source wake listen is_own_address"),
        (
            r"\b(date)?time\.(?!sleep)\w+\(",
            f"{CLOCKED} Handler check_certificate read_passphrase unlock_once",
        ),
        (rf"{OPENS}|key_file\(", f"{READERS} check_certificate check_mac main"),
        (r"subprocess\.\w+\(|os\.(system|exec|spawn|fork)", "Unlocker"),
        (r"environ\b|getenv|sys\.std", "main"),
        (r"signal\.", "serve unlock_once print_table"),
    ],
    ids=["network", "clock", "files", "processes", "environment", "signals"],
)
def test_only_these_touch(pattern: str, names: str) -> None:
    users = {
        node.name if isinstance(node, Definition) else ast.unparse(node)
        for node in TREE.body
        if re.search(pattern, ast.unparse(node))
    }
    assert users == set(names.split())


@pytest.mark.parametrize("each", BREAKS, ids=lambda each: each.promise)
def test_a_break_finds_its_text_once(each: Break) -> None:
    assert CHECKOUT.joinpath(each.file).read_text().count(each.old) == 1
    assert each.old != each.new


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
