"""What holds for every input, tried on many: the parsers, and what they must not do.

The same ones at each time; with EXAMPLES=N in the environment, N others of each, which
`--hypothesis-seed` chooses.
"""

import io
import ipaddress
import os
import re
import string

import h11
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import waker

EXAMPLES = int(os.environ.get("EXAMPLES", "0"))
settings.register_profile(
    "waker",
    max_examples=EXAMPLES or 50,
    derandomize=not EXAMPLES,
    deadline=None,
    database=None,
)
settings.load_profile("waker")
PEER = "192.0.2.1"
TOKEN = string.ascii_letters + string.digits + "!#$%&'*+-.^_`|~"

names = st.text(TOKEN, min_size=1, max_size=9)
values = st.text(string.printable[:95] + "\t\xe4\xa0\x85", max_size=20)
paths = st.text(string.ascii_letters + string.digits + "-._~/:@!$&'()*+,;=", max_size=9)
headers = st.dictionaries(names.map(str.lower), values, max_size=4)


def write(method: str, path: str, others: dict[str, str], body: bytes) -> bytes:
    """Write a request that is right."""
    fields = others | {"Host": "x", "Content-Length": str(len(body))}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} /{path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + body


def spoil(data: bytes, edits: list[tuple[float, int, str]]) -> bytes:
    """Take out some bytes here and there, and put in others."""
    for place, taken, put in edits:
        at = int(place * len(data))
        data = data[:at] + put.encode("latin-1") + data[at + taken :]
    return data


edits = st.tuples(
    st.floats(0, 1),
    st.integers(0, 2),
    st.sampled_from(["", " ", "\t", "\r", "\n", "\r\n", "\r\n\r\n", "\0", "\x0b"])
    | st.sampled_from(["\x7f", "\x85", "\xa0", ":", ",", "0", "5", "x", "%", "%41"])
    | st.sampled_from(["\r\nContent-Length: 3", "\r\nTransfer-Encoding: chunked"]),
)
requests = st.builds(
    spoil,
    st.builds(write, names, paths, headers, st.binary(max_size=9)),
    st.lists(edits, max_size=2),
)


@given(requests | st.binary(max_size=60))
def test_what_is_read_is_what_another_parser_reads(data: bytes) -> None:
    """h11 is more lenient; but what is right for us has one meaning for both."""
    file: io.BufferedReader = io.BufferedReader(io.BytesIO(data))
    try:
        told = waker.read_request(file, PEER, ())
    except waker.Fault as fault:
        assert fault.status in {400, 431, 501}
        return
    peer = h11.Connection(h11.SERVER)
    peer.receive_data(data)
    head = peer.next_event()
    assert isinstance(head, h11.Request)
    body = b""
    while isinstance(event := peer.next_event(), h11.Data):
        body += bytes(event.data)
    assert isinstance(event, h11.EndOfMessage)
    assert head.method.decode() == told.method
    assert head.target.decode().partition("?")[0] == told.path
    assert body == told.body
    assert dict(head.headers).get(b"content-type", b"").decode() == told.content_type


@given(names, paths, headers, st.binary(max_size=99))
def test_a_right_request_is_understood(
    method: str, path: str, others: dict[str, str], body: bytes
) -> None:
    assume(not others.keys() & {"transfer-encoding", "host", "content-length"})
    data = write(method, path, others, body)
    file: io.BufferedReader = io.BufferedReader(io.BytesIO(data))
    told = waker.read_request(file, PEER, ())
    assert (told.method, told.path, told.body) == (method, f"/{path}", body)
    assert told.content_type == others.get("content-type", "").strip(" \t")


@given(st.text("0123456789abcdef.:,% x", max_size=40))
def test_whatever_is_forwarded_the_client_is_an_address(forwarded: str) -> None:
    data = write("GET", "", {"X-Forwarded-For": forwarded}, b"")
    file: io.BufferedReader = io.BufferedReader(io.BytesIO(data))
    proxies = waker.parse_networks("10.0.0.0/8")
    client = waker.read_request(file, "10.0.0.1", proxies).client
    assert str(ipaddress.ip_address(client)) == client
    assert "%" not in client
    waker.counted_as(client)


@given(st.text(), st.integers(0, 3))
def test_a_line_of_the_log_is_one_line_of_printable_ascii(text: str, size: int) -> None:
    kept, (reader, writer) = os.dup(2), os.pipe()
    os.dup2(writer, 2)
    waker.log(f"ip={PEER} {text * 10**size}")
    os.dup2(kept, 2)
    for descriptor in (kept, writer):
        os.close(descriptor)
    with os.fdopen(reader, "rb") as told:
        assert re.fullmatch(rb"ip=192\.0\.2\.1 [ -~]*\n", line := told.read())
    assert len(line) <= waker.LINE + 1
