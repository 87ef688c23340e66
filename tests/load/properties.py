"""What must hold for every input of a parser or of the log, tested with many inputs.

`make fuzz` runs it: EXAMPLES inputs per test, chosen by SEED.
"""

import os
import re
import string

import h11
from hypothesis import given, seed, settings
from hypothesis import strategies as st

import waker

EXAMPLES = int(os.environ.get("EXAMPLES", "300"))
SEED = int(os.environ.get("SEED", "1"))
settings.register_profile("waker", max_examples=EXAMPLES, deadline=None, database=None)
settings.load_profile("waker")
PEER = "192.0.2.1"
TOKEN = string.ascii_letters + string.digits + "!#$%&'*+-.^_`|~"
ODD = (
    *("", " ", "\t", "\r", "\n", "\r\n", "\r\n\r\n", "\0", "\x7f", "\x85", "\xa0"),
    *(":", ",", "0", "x", "%41", "\r\n ", " :"),
    *("\r\nContent-Length: 3", "\r\nTransfer-Encoding: chunked"),
)

names = st.text(TOKEN, min_size=1, max_size=9)
values = st.text(string.printable[:95] + "\t\xe4\xa0\x85", max_size=20)
paths = st.text(string.ascii_letters + string.digits + "-._~/:@!$&'()*+,;=", max_size=9)
others = st.lists(st.tuples(st.sampled_from(["X", "Y"]) | names, values), max_size=4)
edits = st.lists(
    st.tuples(st.integers(0, 29), st.booleans(), st.sampled_from(ODD)), max_size=2
)


def write(method: str, path: str, others: list[tuple[str, str]], body: bytes) -> bytes:
    """Format a valid request."""
    fields = [("Host", "x"), ("Content-Length", str(len(body))), *others]
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields)
    return f"{method} /{path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + body


def end() -> bytes:
    """Stand in for a client that sends no more."""
    raise waker.HttpError(400, "The request ended")


@seed(SEED)
@given(st.builds(write, names, paths, others, st.binary(max_size=99)), edits)
def test_a_request_is_refused_or_parsed_as_h11_parses_it(
    data: bytes, edits: list[tuple[int, bool, str]]
) -> None:
    """h11 accepts more, except that it insists on one Host."""
    pieces = re.split("(\r\n|[: /])", data.decode("latin-1"))
    for place, taken, put in edits:
        at = place % len(pieces)
        pieces[at : at + taken] = [put]
    data = "".join(pieces).encode("latin-1")
    try:
        request = waker.read_request(data, end, PEER, frozenset())
    except waker.HttpError as refusal:
        assert edits, "a valid request was refused"
        assert refusal.status in {400, 431, 501}
        return
    peer = h11.Connection(h11.SERVER)
    peer.receive_data(data)
    try:
        head = peer.next_event()
    except h11.RemoteProtocolError as error:
        assert "Host: header" in str(error)
        return
    assert isinstance(head, h11.Request)
    body = b""
    while isinstance(event := peer.next_event(), h11.Data):
        body += bytes(event.data)
    assert isinstance(event, h11.EndOfMessage)
    seen = head.method.decode(), head.target.decode().partition("?")[0], body
    assert seen == (request.method, request.path, request.body)
    for name, value in request.fields.items():
        same = [v for n, v in head.headers if n.decode() == name]
        assert value == b", ".join(same).decode("latin-1")


@seed(SEED)
@given(st.text(), st.sampled_from([1, 1000]))
def test_a_log_entry_is_one_line_of_printable_ascii(text: str, size: int) -> None:
    kept, (reader, writer) = os.dup(2), os.pipe()
    os.dup2(writer, 2)
    waker.log(f"ip={PEER} {text * size}")
    os.dup2(kept, 2)
    for descriptor in (kept, writer):
        os.close(descriptor)
    with os.fdopen(reader, "rb") as written:
        line = written.read()
    assert re.fullmatch(rb"ip=192\.0\.2\.1 [ -~]*\n", line)
    assert len(line) <= 1000 + 1
