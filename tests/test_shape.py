"""What waker.py may touch, and whether it, its units and its descriptions agree."""

import ast
import json
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import yaml
from conftest import CHECKOUT, MACHINE, daemon, run_waker
from machine import Machine

import waker
from box import notify

SOURCE = CHECKOUT.joinpath("waker.py").read_text()
TREE = ast.parse(SOURCE)
NETWORK = r"socket\.(socket|create_\w+|getaddrinfo)\(|\.connect\(\(|sendto\("
API = yaml.safe_load(CHECKOUT.joinpath("docs/openapi.yaml").read_text())
SCHEMAS = API["components"]["schemas"]
PAGE = CHECKOUT.joinpath("docs/api.md").read_text()
MAY_USE_IT = {"open_tcp", "find_source_address", "wake", "listen"}


def users(pattern: str) -> set[str]:
    """Return the classes and functions whose code the pattern matches."""
    kinds = ast.FunctionDef, ast.ClassDef
    return {
        node.name if isinstance(node, kinds) else ast.unparse(node)
        for node in TREE.body
        if re.search(pattern, ast.unparse(node))
    }


def test_it_can_be_read_in_one_sitting() -> None:
    assert len(SOURCE.splitlines()) <= 2120


def test_few_functions_touch_the_network_and_one_starts_processes() -> None:
    """And only commands read the environment. None writes a file."""
    assert users(NETWORK) == MAY_USE_IT
    assert len(users(r"\bPopen\(|subprocess\.\w+\(|os\.(system|exec|spawn|fork)")) == 1
    assert users(r"environ\b|getenv") == {"read_values", "run_command"}
    assert not users(r"write_(text|bytes)|open\([^)]*['\"][rb]*[wax+]|mkdir|unlink")


def test_the_tests_need_few_names_of_it() -> None:
    """Or to move something in it would break tests of something else."""
    tests = "".join(path.read_text() for path in CHECKOUT.glob("tests/**/*.py"))
    names = {*re.findall(r"\bwaker\.(\w+)", tests)} & vars(waker).keys()
    assert len(names) <= 25, sorted(names)


def test_no_program_is_among_the_pages() -> None:
    files = [path for path in CHECKOUT.glob("docs/**/*") if path.is_file()]
    others = {path.name for path in files if path.suffix not in (".md", ".png")}
    assert others == {"openapi.yaml"}


def test_it_and_the_demo_need_only_paramiko_besides_python() -> None:
    for file in ("waker.py", "tests/support/homelab.py"):
        nodes = ast.walk(ast.parse(CHECKOUT.joinpath(file).read_text()))
        imports = [n for n in nodes if isinstance(n, ast.Import | ast.ImportFrom)]
        modules = {re.split("[ .]", ast.unparse(node))[1] for node in imports}
        assert modules - sys.stdlib_module_names - {"waker"} == {"paramiko"}


def test_an_old_python_is_reported_before_anything_else() -> None:
    tree = ast.parse(SOURCE, feature_version=(3, 8))
    first, check = map(ast.unparse, tree.body[1:3])
    assert first == "import sys"
    assert check.startswith("if sys.version_info < (3, 11):\n    sys.exit('waker needs")


def test_the_routes_are_those_that_are_described() -> None:
    """If waker.py has others, their paths are among its texts."""
    routes = {}
    with daemon(MACHINE) as started:
        call = started.client.call
        for path in {*re.findall(r'"(/[\w/.-]*)"', SOURCE)}:
            refusal = call("TRACE", path)
            if refusal.status == 405:
                for method in refusal.headers["Allow"].split(", "):
                    routes[method, path] = call(method, path).status != 401
    described = {
        (method.upper(), path): "security" not in operation
        for path, operations in API["paths"].items()
        for method, operation in operations.items()
    }
    assert described == routes
    table = PAGE.split("| request | answer |")[1].split("\n\n")[0]
    assert {*re.findall(r"`([A-Z]+) (/\S*?)`", table)} == {
        route for route in routes if route[0] != "HEAD"
    }


def find_examples(node: Any) -> Iterator[tuple[dict[str, Any], object]]:
    """Yield each schema of the description that has an example, and that."""
    if isinstance(node, dict) and "example" in node:
        yield node.get("schema", node), node["example"]
    for inner in node.values() if isinstance(node, dict) else ():
        yield from find_examples(inner)


def test_each_example_is_what_its_schema_describes() -> None:
    examples = [*find_examples(API)]
    assert len(examples) > 9
    for schema, example in examples:
        shared = {"components": API["components"]}  # to which schemas refer
        jsonschema_rs.validate(schema | shared, example)


def test_the_status_has_the_members_that_are_described(machine: Machine) -> None:
    """And `waker state` prints some of them."""
    with machine.starting() as client:
        status = client.status()
    for name, shown in (("Status", status), ("Start", status["start"])):
        schema = SCHEMAS[name]
        assert [*shown] == schema["required"] == [*schema["properties"]]
    of_status, of_start = PAGE.split("\n| member |")[1:]
    rows = re.findall(r"(?m)^\| `(\w+)` \| ([a-z ]+) \|", of_status.split("\n\n")[0])
    assert [name for name, _ in rows] == [*status]
    for name, kind in rows:
        described = SCHEMAS["Status"]["properties"][name].get("type", kind)
        assert kind == described or kind.split(" or ") == described
    members = re.findall(r"(?m)^\| `(\w+)`", of_start.split("\n\n")[0])
    assert members == [*status["start"]]
    ended = run_waker("state", settings=machine.settings())
    assert (ended.returncode, ended.stderr, ended.stdout.count("\n")) == (0, "", 1)
    names = "state", "reachable", "initrd_ssh_open", "system_ssh_open"
    assert json.loads(ended.stdout) == {name: status[name] for name in names}


def test_the_words_for_programs_are_those_that_are_described() -> None:
    described = SCHEMAS["Start"]["properties"]
    outcomes = re.findall(r'(?m)^    [A-Z_]+ = "([a-z_]+)", \d{3}, "', SOURCE)
    assert {*described["outcome"]["enum"]} == {*outcomes, None}
    phases = re.findall(r'(?m)^    [A-Z]+ = "([a-z]+)"$', SOURCE)
    assert {*described["phase"]["enum"]} == {*phases}


def test_the_program_and_its_units_agree() -> None:
    unit = CHECKOUT.joinpath("waker.service").read_text()
    values = dict(re.findall(r"(?m)^(\w+)=(.*)$", unit))
    assert values["RestartPreventExitStatus"] == str(os.EX_CONFIG)
    assert (values["Restart"], values["OOMPolicy"]) == ("on-failure", "continue")
    assert values["WantedBy"] == "multi-user.target"  # it starts when the box does
    assert int(values["RestartSec"]) > 2  # systemd gives up after five starts in 10 s
    stop = values["TimeoutStopSec"]
    assert int(stop) > 90 + 5  # a process that unlocks is killed then
    assert values["KillMode"] == "mixed"  # only the daemon gets SIGTERM
    assert f"term_timeout {stop} " in CHECKOUT.joinpath("waker.init").read_text()
    passed = re.findall(r"(?m)^LoadCredential=(.*):/etc/waker/\1$", unit)
    given = re.findall("SetCredential=(.*?):", unit)
    assert passed == given == ["waker.env", "ssh_key"]

    unit = CHECKOUT.joinpath("box/notify/waker-notify.service").read_text()
    passed = re.findall(r"(?m)^LoadCredential=(.*):/etc/waker/\1$", unit)
    assert passed == re.findall(r"%d/(\S+)", unit) == ["waker.env", "notify_url"]
    assert f"\nStateDirectory={notify.STATE.name}\n" in unit


def test_its_version_is_the_newest_that_was_released() -> None:
    changes = CHECKOUT.joinpath("CHANGELOG.md").read_text()
    newest, *_ = re.findall(r"(?m)^## (\S+)$", changes)  # others say "(not released)"
    ended = run_waker("--version")
    assert (ended.returncode, ended.stdout) == (0, f"waker {newest}\n")
