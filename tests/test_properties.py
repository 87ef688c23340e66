"""What holds for every input, tried on many: the parsers, and what they must not do.

`--examples N` tries N of each; `--hypothesis-seed` chooses which ones.
"""

import base64
import io
import ipaddress
import json
import os
import re
import string
from typing import Any

import h11
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import waker

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
anything = requests | st.binary(max_size=60)


def parse(data: bytes) -> waker.Request | int:
    """Read a request, or the status of what is wrong with it; nothing else may come."""
    file: io.BufferedReader = io.BufferedReader(io.BytesIO(data))
    try:
        return waker.read_request(file, PEER, ())
    except waker.Fault as fault:
        return fault.status


@given(anything)
def test_a_request_is_read_or_refused(data: bytes) -> None:
    told = parse(data)
    if isinstance(told, int):
        assert told in {400, 431, 501}
    else:
        assert re.fullmatch(f"[{re.escape(TOKEN)}]+", told.method)
        assert re.fullmatch(r"/[!-~]*", told.path)
        assert told.client == PEER
        assert told.body is None or told.body in data


@given(requests)
def test_what_is_read_is_what_another_parser_reads(data: bytes) -> None:
    """h11 is more lenient; but what is right for us has one meaning for both."""
    told = parse(data)
    assume(isinstance(told, waker.Request))
    assert isinstance(told, waker.Request)
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
    told = parse(data)
    assert isinstance(told, waker.Request)
    assert (told.method, told.path, told.body) == (method, f"/{path}", body)
    kind = others.get("content-type", "").strip(" \t")
    assert (told.client, told.content_type) == (PEER, kind)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
bodies = st.one_of(
    st.binary(max_size=40),
    json_values.map(lambda value: json.dumps(value).encode()),
    st.dictionaries(st.just("pin") | st.text(max_size=3), json_values).map(
        lambda value: json.dumps(value).encode()
    ),
    st.text('{}[]":,pin\\u0dNa1 ', max_size=30).map(str.encode),
)


@given(bodies)
def test_a_body_gives_its_text_or_a_bad_request(body: bytes) -> None:
    request = waker.Request("POST", "/x", PEER, 0, "application/json", "", body)
    try:
        text = waker.text_member(request, "pin")
    except waker.Fault as fault:
        assert fault.status == 400
    else:
        assert text == json.loads(body)["pin"]
        assert text.encode()


@given(st.text("0123456789abcdef.:,% x", max_size=40))
def test_whatever_is_forwarded_the_client_is_an_address(forwarded: str) -> None:
    data = write("GET", "", {"X-Forwarded-For": forwarded}, b"")
    file: io.BufferedReader = io.BufferedReader(io.BytesIO(data))
    proxies = waker.parse_networks("10.0.0.0/8")
    client = waker.read_request(file, "10.0.0.1", proxies).client
    assert str(ipaddress.ip_address(client)) == client
    assert "%" not in client
    waker.counted_as(client)


pairs = st.from_regex(r"([0-9A-F]{2}[:-]){5}[0-9a-f]{2}", fullmatch=True)
sockets = st.from_regex(r"([0-9]{1,3}\.){3}[0-9]{1,3}:[0-9]{1,5}|\[[0-9a-f:]+\]:9")
blobs = st.binary(max_size=40).map(
    lambda key: b"\0\0\0\x0bssh-ed25519" + len(key).to_bytes(4) + key
)
host_keys = blobs.map(lambda blob: f"ssh-ed25519 {base64.b64encode(blob).decode()}")


def write_listen(address: waker.Address) -> str:
    return "[{}]:{}".format(*address) if ":" in address[0] else "{}:{}".format(*address)


@pytest.mark.parametrize(
    ("parser", "write", "right"),
    [
        (waker.parse_mac, lambda mac: mac.hex(":"), pairs),
        (waker.parse_listen, write_listen, sockets),
        (waker.HostKey.parse, str, host_keys),
        (waker.Passphrase, lambda it: it.data.decode(), st.text(min_size=1)),
    ],
)
@given(data=st.data())
def test_a_setting_is_refused_or_means_what_it_says(
    parser: Any, write: Any, right: st.SearchStrategy[str], data: st.DataObject
) -> None:
    text = data.draw(right | st.text())
    try:
        value = parser(text)
    except ValueError:
        return
    assert parser(write(value)) == value or write(value) == text


@given(
    st.binary(max_size=60)
    | st.text("WAKER_PIN='\"# \n\\x", max_size=40).map(str.encode)
)
def test_an_env_file_is_read_or_its_lines_are_named(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    file = tmp_path_factory.getbasetemp() / "waker.env"
    file.write_bytes(data)
    try:
        values = waker.read_env_file(file)
    except waker.ConfigError as error:
        assert str(file) in str(error)
    else:
        assert all("\n" not in value for value in values.values())


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
