"""Bytes to responses and events, however they are split."""

import re
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from loadgen_stub import END, HEAD, chunk

from loadgen import http_parser, sse_parser
from loadgen.errors import WireError
from loadgen.http_parser import ResponseParser
from loadgen.sse_parser import SseParser


def pieces(data, cuts):
    """Split data at the given places."""
    bounds = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(bounds)]


def events_by_the_book(data):
    """The HTML standard's algorithm, line by line over the whole stream."""
    *lines, _unfinished = re.split(rb"\r\n|\n|\r", data.removeprefix(b"\xef\xbb\xbf"))
    events, buffer = [], b""
    for line in lines:
        if not line:
            if buffer:
                events.append(buffer[:-1])
            buffer = b""
            continue
        name, _, value = line.partition(b":")
        if name == b"data":
            buffer += value.removeprefix(b" ") + b"\n"
    return events


sse_text = st.lists(
    st.sampled_from(
        [
            b"data: ",
            b"data:",
            b"data",
            b"\n",
            b"\n\n",
            b"\r\n",
            b"\r",
            b": ping",
            b"event: x",
            b"id: 1",
            b"{}",
            b"[DONE]",
            b" ",
            b"\xef\xbb\xbf",
            b"\xf0\x9f\x98\x80",
            b"retry: 5",
        ]
    ),
    max_size=40,
).map(b"".join)
cuts = st.lists(st.integers(0, 1 << 16), max_size=12)


@given(data=sse_text, cuts=cuts)
@example(data=b"data: a\r\n\r\ndata: b\r\n\r\n", cuts=[8, 10])
@example(data=b"\xef\xbb\xbfdata: a\n\n", cuts=[1, 2])
@example(data=b"data: a\n\n\ndata: b\n\n", cuts=[9])
@example(data=b"data: a\r\rdata: b\n\n", cuts=[9])
def test_events_are_the_standards_whatever_the_split(data, cuts):
    """Any bytes in any pieces give the events of the standard's own algorithm."""
    parser = SseParser()

    events = [event for piece in pieces(data, cuts) for event in parser.feed(piece)]

    assert events == events_by_the_book(data)


def test_a_final_carriage_return_ends_an_event_at_once():
    """An event is not held back until it is known whether a line feed follows."""
    assert SseParser().feed(b"data: a\r\r") == [b"a"]


def test_an_endless_event_is_refused(monkeypatch):
    """An event without end does not fill the memory."""
    monkeypatch.setattr(sse_parser, "EVENT_BYTES_MAX", 100)
    parser = SseParser()

    with pytest.raises(WireError, match="more than 100 bytes"):
        for _ in range(11):
            parser.feed(b"data: 4567")


bodies = st.lists(st.binary(min_size=1, max_size=40), max_size=8)


@given(parts=bodies, cuts=cuts, extension=st.sampled_from([b"", b";name=value", b" "]))
def test_a_chunked_body_comes_whole_whatever_the_split(parts, cuts, extension):
    """Chunks in any pieces give the body, its end, and a connection to use again."""
    data = HEAD + b"".join(b"%X%b\r\n%b\r\n" % (len(p), extension, p) for p in parts) + b"0\r\nTrailer: x\r\n\r\n"
    parser = ResponseParser()

    body = b"".join(parser.feed(piece) for piece in pieces(data, cuts))

    assert body == b"".join(parts)
    assert (parser.status, parser.is_complete, parser.keep_alive) == (200, True, True)


@given(body=st.binary(max_size=60), cuts=cuts)
def test_a_body_of_known_length_comes_whole_whatever_the_split(body, cuts):
    """A length in any pieces gives the body; an interim answer before it is passed over."""
    head = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 503 Busy\r\ncontent-length: %d\r\n\r\n" % len(body)
    parser = ResponseParser()

    read = b"".join(parser.feed(piece) for piece in pieces(head + body, cuts))

    assert (read, parser.status, parser.is_complete) == (body, 503, True)


def test_each_chunk_of_its_own_read_is_passed_on():
    """The fast path gives what the general one gives."""
    parser = ResponseParser()
    parser.feed(HEAD)

    assert [parser.feed(data) for data in (chunk(b"one"), chunk(b"two"), END)] == [b"one", b"two", b""]
    assert parser.is_complete


def test_a_body_without_length_ends_with_the_connection():
    """Without length or chunks the body goes on, and the connection is not used again."""
    parser = ResponseParser()

    body = parser.feed(b"HTTP/1.1 200 OK\r\n\r\nab") + parser.feed(b"c")

    assert body == b"abc"
    assert (parser.ends_with_connection, parser.is_complete, parser.keep_alive) == (True, False, False)


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nConnection: Close", False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 0", False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 0\r\nconnection: keep-alive", True),
        (b"HTTP/1.1 204 None", True),
    ],
)
def test_whether_a_connection_is_kept(head, expected):
    """Version and Connection header decide."""
    parser = ResponseParser()
    parser.feed(head + b"\r\n\r\n")

    assert (parser.is_complete, parser.keep_alive) == (True, expected)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "not an HTTP/1.1 answer"),
        (b"HTTP/1.1 101 Switching\r\n\r\n", "upgrade"),
        (b"HTTP/1.1 200 OK\r\nnonsense\r\n\r\n", "without a colon"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n", "compressed"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n", "transfer coding"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: +3\r\n\r\n", "content length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nab", "after the end"),
        (HEAD + b"-3\r\nabc\r\n", "a chunk of size"),
        (HEAD + b"3\r\nabcd\r\n", "longer than its size"),
        (HEAD + b"1" * 5000, "more than 4096 bytes"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * (http_parser.HEAD_BYTES_MAX + 1), "more than 65536 bytes"),
    ],
)
def test_what_is_not_http_is_refused(data, complaint):
    """Bytes that break the protocol are named, not guessed at."""
    with pytest.raises(WireError, match=complaint):
        ResponseParser().feed(data)


@given(data=st.binary(max_size=200), cuts=cuts, start=st.sampled_from([b"", HEAD, HEAD + b"5\r\nab"]))
def test_no_bytes_crash_the_parsers(data, cuts, start):
    """Whatever comes is read or refused."""
    response, events = ResponseParser(), SseParser()
    try:
        for piece in pieces(start + data, cuts):
            events.feed(response.feed(piece))
    except WireError:
        pass
    assert len(response._buffer) <= http_parser.HEAD_BYTES_MAX
