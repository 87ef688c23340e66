"""The form of waker.py, which its docstring promises to who reads it; and one word for
all: what README, tests/openapi.yaml, the units and the program say of each other."""

import ast
import os
import re
import statistics
import sys
from pathlib import Path

import pytest
import yaml
from conftest import CHECKOUT, PROGRAM, run_waker

import waker

SOURCE = Path(PROGRAM).read_text()
TREE = ast.parse(SOURCE)
README = CHECKOUT.joinpath("README.md").read_text()

Function = ast.FunctionDef
Definition = ast.FunctionDef | ast.ClassDef
CONSTANT = ast.Constant | ast.Name | ast.Attribute | ast.Tuple
FUNCTIONS = [node for node in ast.walk(TREE) if isinstance(node, Function)]
STORE = ast.Store
CLASSES = [node for node in TREE.body if isinstance(node, ast.ClassDef)]


VALUES = [node for node in TREE.body if isinstance(node, ast.AnnAssign | ast.Assign)]


def stored(node: ast.AST) -> set[str]:
    """Tell which names a statement gives a value to, arguments included."""
    inside = list(ast.walk(node))
    names = {
        n.id for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, STORE)
    }
    return names | {n.arg for n in inside if isinstance(n, ast.arg)}


def users(pattern: str) -> set[str]:
    """Name the definitions at the top level, and the lines, that have the pattern."""
    return {
        node.name if isinstance(node, Definition) else ast.unparse(node)
        for node in TREE.body
        if re.search(pattern, ast.unparse(node))
    }


def test_it_is_small_and_built_on_the_http_server_of_the_standard_library() -> None:
    """What was asked for: the number of lines may fall, and must not grow."""
    assert len(SOURCE.splitlines()) <= 1899
    bases = {ast.unparse(base) for kind in CLASSES for base in kind.bases}
    assert bases == {
        *("BaseHTTPRequestHandler", "ThreadingHTTPServer"),
        *("NamedTuple", "Exception", "enum.Enum", "io.RawIOBase"),  # none is our own
    }


def test_it_imports_the_standard_library_and_paramiko_and_nothing_else() -> None:
    modules = {
        ast.unparse(node).split()[1].split(".")[0]
        for node in ast.walk(TREE)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert modules - sys.stdlib_module_names == {"paramiko"}


def test_a_name_is_made_before_it_is_read() -> None:
    lines = {
        node.name: node.lineno for node in TREE.body if isinstance(node, Definition)
    }
    lines |= {name: value.lineno for value in VALUES for name in stored(value)}
    assert len(lines) > 100
    for statement in TREE.body:
        inside = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
        read = {node.id for node in inside} - stored(statement)
        later = {name for name in read if lines.get(name, 0) > statement.lineno}
        assert not later, statement.lineno


def test_nothing_at_module_level_can_change() -> None:
    assert not [node for node in ast.walk(TREE) if isinstance(node, ast.Global)]
    for name in {name for value in VALUES for name in stored(value)} & {*vars(waker)}:
        hash(getattr(waker, name))  # lists, sets and dictionaries have none
    calls = [n for value in VALUES for n in ast.walk(value) if isinstance(n, ast.Call)]
    made_by = {ast.unparse(call.func) for call in calls}
    assert made_by == {"functools.partial", "NewType", "Dialect", "re.compile"}
    for kind in CLASSES:
        for statement in kind.body:  # nor a value that all of a kind share
            if isinstance(statement, ast.AnnAssign | ast.Assign) and statement.value:
                assert isinstance(statement.value, CONSTANT), kind.name


def test_functions_are_short_and_typed() -> None:
    lengths = []
    for function in FUNCTIONS:
        lengths.append((function.end_lineno or 0) - function.lineno + 1)
        assert lengths[-1] <= 40, function.name
        assert function.returns, function.name
    assert statistics.median(lengths) <= 10
    for kind in CLASSES:
        assert ast.get_docstring(kind), kind.name


def test_each_section_begins_with_its_law() -> None:
    banners = re.findall(r"(?m)^# ---- .*\n(.*)", SOURCE)
    assert len(banners) > 10
    assert all(line.startswith("# ") for line in banners), banners
    assert all(len(line) == 88 for line in SOURCE.splitlines() if "# ----" in line)


def test_there_is_no_magic() -> None:
    for kind in CLASSES:
        assert not kind.keywords
        assert not kind.decorator_list
    for function in FUNCTIONS:
        decorators = {ast.unparse(node) for node in function.decorator_list}
        assert decorators <= {"classmethod"}, function.name
        assert not function.args.kwarg, function.name
    known = {node.id for node in ast.walk(TREE) if isinstance(node, ast.Name)}
    assert not known & {"setattr", "eval", "exec", "globals", "__import__"}


OPENS = r"(?<!tls)\.open\(|(?<![.\w])(?<!def )open\(|\b(read|write)_(text|bytes)\("


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        (
            r"socket\.(socket|create_\w+|getaddrinfo)\(|\.connect\(\(|sendto\(",
            "open_tcp find_source wake listen",
        ),
        (
            r"\btime\.(?!sleep|strftime|gmtime)\w+\(",
            "knock Command judge converse unlock Unlocker Starter Incoming read_request"
            " Handler Server unlock_once",
        ),
        (rf"{OPENS}|key_file\(", "file_fault read_env_file load_page load_key main"),
        (r"subprocess\.\w+\(|os\.(system|exec|spawn|fork)", "Unlocker"),
        (r"environ\b|getenv", "main"),
        (r"signal\.", "serve unlock_once print_table"),
        (r"sys\.std", ""),
    ],
    ids=["network", "clock", "files", "processes", "environment", "signals", "streams"],
)
def test_only_these_touch(pattern: str, names: str) -> None:
    assert users(pattern) == set(names.split())


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
    rows = README.split("| request | answer |")[1].split("\n\n")[0].splitlines()
    table = [re.findall(r"`([A-Z]+) (/\S*?)`", row) for row in rows[2:]]
    assert {pair for row in table for pair in row} == set(routes)
    assert {*table[0], *table[-1]} == {pair for pair in routes if routes[pair]}
    unit = CHECKOUT.joinpath("waker.service").read_text()
    procd = CHECKOUT.joinpath("waker.init").read_text()
    values = dict(re.findall(r"(?m)^(\w+)=(.*)$", unit))
    assert values["RestartPreventExitStatus"] == str(os.EX_CONFIG)
    assert (
        int(values["TimeoutStopSec"]) > waker.Config._field_defaults["unlock_seconds"]
    )
    assert f"term_timeout {values['TimeoutStopSec']} " in procd
    assert f"in {waker.Config._field_defaults['unlock_seconds']} s at most" in procd
    handed_over = re.findall("LoadCredential=(.*?):/etc/waker/(.*)", unit)
    names = ", ".join(f"`{name}`" for name, _ in handed_over[:-1])
    assert f"The unit hands {names} and `{handed_over[-1][1]}` of" in README
    assert all(name == file for name, file in handed_over)
    commands = re.findall(r"\[(serve.*)\]", waker.__doc__ or "")[0].split(" | ")
    assert f"[{{{','.join(commands)}}}]" in run_waker("--help").stdout
    for name in commands[1:]:
        assert f" {name}`" in README or f" {name}\n" in README, name
