"""Break each promise in a copy of the program: does a test notice? `make breaks`

`breaks.txt` has three lines for each break: a promise; a place and a change there; and
the tests that must fail then. A place is a file or, after its name, a class, function
or constant there; those of waker.py may stand alone. A change is one of these:

    an expression ==> another expression
    words of a line ==> deleted
    words of a line ==> moved before words of another line
    words of a line ==> moved after words of another line

White space, comments and commas before a bracket do not matter. Quote the least that is
unique in the file and shows what breaks, so that the row outlives a restructuring. Name
a class or function only if the words are not unique without it.
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
TOKEN = r"""(?x) "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*' | \w+ | [^\s,] | ,(?!\s*[])}])"""


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


def find(text: str, pattern: str, what: str) -> re.Match[str]:
    """Find the only match of a pattern. Raises: Stale."""
    found = [*re.finditer(f"(?m){pattern}", text)]
    if len(found) != 1:
        raise Stale(f"{what} is there {len(found)} times")
    return found[0]


def replace(found: re.Match[str], new: str) -> str:
    """Return the whole text, with something else in place of what was found."""
    return found.string[: found.start()] + new + found.string[found.end() :]


def find_block(text: str, name: str, indent: str) -> re.Match[str]:
    """Find the line that names something, and those that are indented below it."""
    words = r"(?:async |class |const |def |function )*"
    first = rf"^{indent}{words}{re.escape(name)}(?!\w).*\n"
    return find(text, rf"{first}(?:(?:{indent}[ )\]}}].*)?\n)*", name)


def write_pattern(code: str, comment: str) -> str:
    """Write a pattern that finds code, however it is laid out."""
    gap = rf"(?:\s|(?<=\s){comment}.*$|,(?=\s*[])}}]))*"
    tokens = map(re.escape, re.findall(TOKEN, code))
    return rf"(?:\b|(?=\W)){gap.join(tokens)}(?:\b|(?<=\W))"


def change(text: str, old: str, new: str, comment: str) -> str:
    """Return the text with a change. Raises: Stale."""
    pattern = write_pattern(old, comment)
    if new != "deleted" and not new.startswith("moved "):
        return replace(find(text, pattern, old), new)
    taken = find(text, rf"^.*{pattern}.*\n", old)
    text = replace(taken, "")
    if new == "deleted":
        return text
    _, where, other = new.split(" ", 2)
    target = find(text, rf"^( *).*{write_pattern(other, comment)}.*\n", other)
    moved = textwrap.indent(textwrap.dedent(taken[0]), target[1])
    both = moved + target[0] if where == "before" else target[0] + moved
    return replace(target, both)


def apply(row: Break, checkout: Path) -> None:
    """Break the promise. Raises: Stale."""
    file, _, place = row.place.partition(" ")
    if not checkout.joinpath(file).is_file():
        file, place = "waker.py", row.place
    text = checkout.joinpath(file).read_text()
    blocks = []
    for depth, name in enumerate(filter(None, place.split("."))):
        blocks.append(find_block(text, name, "    " * depth))
        text = blocks[-1][0]
    text = change(text, row.old, row.new, "//" if file == "ui.html" else "#")
    for block in reversed(blocks):
        text = replace(block, text)
    checkout.joinpath(file).write_text(text)


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
    return int({*results} != {"noticed"})


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
