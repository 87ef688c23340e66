"""Break each promise in a copy of the program: does a test notice? `make breaks`

`breaks.txt` has three lines for each break: a promise; a place and a change there; and
the tests that must fail then. A place is a class, function or constant of waker.py or,
after its name, of another file, or that file as a whole. A change is one of these:

    an expression ==> another expression
    a statement ==> deleted
    a statement ==> moved before another statement
    a statement ==> moved after another statement

White space, comments and commas before a bracket do not matter.
"""

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

CHECKOUT = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns(".*", "dist", "__pycache__")
AT_ONCE = 6  # because most tests mostly wait
TOKEN = r"""(?P<kept>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|\w+|[^\s,]|,(?!\s*[])}]))"""


class Stale(Exception):
    """A row that no longer fits the program."""


class Break(NamedTuple):
    promise: str
    place: str
    old: str
    new: str
    tests: str  # arguments of pytest, in the folder tests


def read_breaks() -> list[Break]:
    text = Path(__file__).with_suffix(".txt").read_text()
    lines = [line.strip() for line in text.splitlines() if line and line[0] != "#"]
    breaks = []
    for promise, change, tests in zip(*[iter(lines)] * 3, strict=True):
        place, _, edit = change.partition(": ")
        old, _, new = edit.partition(" ==> ")
        breaks.append(Break(promise, place, old, new, tests))
    return breaks


def find_only(found: list[slice], what: str) -> slice:
    if len(found) != 1:
        raise Stale(f"{what} is there {len(found)} times")
    return found[0]


def find_block(text: str, name: str, indent: str) -> slice:
    """Find the line that names something, and those that are indented below it."""
    words = r"(?:async |class |const |def |function |let )*"
    first = rf"^{indent}{words}{re.escape(name)}(?!\w).*\n"
    block = rf"(?m){first}(?:(?:{indent}[ )\]}}].*)?\n)*"
    found = [slice(*each.span()) for each in re.finditer(block, text)]
    return find_only(found, name)


def find_tokens(text: str, old: str, comment: str) -> slice:
    """Find an expression, however it is written."""
    every = [each for each in re.finditer(f"{comment}|{TOKEN}", text) if each["kept"]]
    wanted = [each["kept"] for each in re.finditer(TOKEN, old)]
    windows = (every[n : n + len(wanted)] for n in range(len(every)))
    found = [
        slice(window[0].start(), window[-1].end())
        for window in windows
        if [each["kept"] for each in window] == wanted
    ]
    return find_only(found, old)


def find_lines(text: str, statement: str, comment: str) -> slice:
    """Find the lines of a statement."""
    found = find_tokens(text, statement, comment)
    start = text.rfind("\n", 0, found.start) + 1
    return slice(start, text.index("\n", found.stop) + 1)


def change(text: str, old: str, new: str, comment: str) -> str:
    """Return the text with a change."""
    if new != "deleted" and not new.startswith("moved "):
        found = find_tokens(text, old, comment)
        return text[: found.start] + new + text[found.stop :]
    found = find_lines(text, old, comment)
    taken = textwrap.dedent(text[found])
    text = text[: found.start] + text[found.stop :]
    if new == "deleted":
        return text
    _, where, other = new.split(" ", 2)
    found = find_lines(text, other, comment)
    target = text[found]
    indent = target[: len(target) - len(target.lstrip())]
    place = {"before": found.start, "after": found.stop}[where]
    return text[:place] + textwrap.indent(taken, indent) + text[place:]


def apply(row: Break, checkout: Path) -> None:
    """Break the promise. Raises: Stale."""
    file, _, place = row.place.partition(" ")
    if not checkout.joinpath(file).is_file():
        file, place = "waker.py", row.place
    comment = r"\s+//.*" if file == "ui.html" else r"\s+#.*"
    whole = checkout.joinpath(file).read_text()
    block = slice(0, len(whole))
    for depth, name in enumerate(filter(None, place.split("."))):
        inner = find_block(whole[block], name, "    " * depth)
        block = slice(block.start + inner.start, block.start + inner.stop)
    changed = change(whole[block], row.old, row.new, comment)
    changed = whole[: block.start] + changed + whole[block.stop :]
    checkout.joinpath(file).write_text(changed)


def run(row: Break) -> str:
    """Return what came of it: noticed, SURVIVED, not run, or stale."""
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder, "waker")
        shutil.copytree(CHECKOUT, checkout, ignore=LEFT_OUT)
        try:
            apply(row, checkout)
        except Stale as stale:
            return f"stale: {stale}"
        arguments = shlex.split(f"-qx --timeout=120 -m '' tests/{row.tests}")
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", *arguments],
            cwd=checkout,
            capture_output=True,
            text=True,
            check=False,
        )
    last = ended.stdout.rstrip().rpartition("\n")[2]
    if re.search(r"\d failed", last):
        return "noticed"
    # A test that was skipped, is not there or could not be set up has seen nothing.
    return "SURVIVED" if re.search(r"\d passed", last) else f"not run: {last}"


def main(words: str) -> int:
    rows = [row for row in read_breaks() if words in " ".join(row)]
    if not rows:
        sys.exit(f"No break contains {words!r}.")
    results = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for row, result in zip(rows, pool.map(run, rows), strict=True):
            results.append(result)
            if result != "noticed":
                print(f"{result}: {row.promise}", flush=True)
    print(f"{results.count('noticed')} of {len(rows)} breaks were noticed")
    return int("SURVIVED" in results)


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
