"""One answer, from its bytes to its record."""

import json

import pytest
from loadgen_stub import END, HEAD, chunk, content, event, finish, stream

from loadgen.answer import READERS, message_of
from loadgen.exchange import HttpExchange, Ticket
from loadgen.sample import ErrorKind


def payload(fields):
    return json.dumps(fields).encode()


def read(*events, endpoint="chat"):
    """What a reader makes of events that come a millisecond apart."""
    reader = READERS[endpoint]()
    for number, data in enumerate(events, 1):
        reader.read(data, number * 1_000_000)
    return reader, reader.answer(first_byte_ns=None, num_bytes=0)


def delta(**fields):
    return payload({"choices": [{"index": 0, "delta": fields, "finish_reason": None, "logprobs": None}]})


@pytest.mark.parametrize(
    ("endpoint", "data", "expected"),
    [
        ("chat", delta(content="a"), True),
        ("chat", delta(content='"'), True),
        ("chat", b'{"choices":[{"delta":{"content":"a"}}]}', True),
        ("chat", b'{"choices":[{"delta":{"content":""}},{"delta":{"content":"a"}}]}', True),
        ("chat", delta(reasoning_content="hm"), True),
        ("chat", delta(tool_calls=[{"function": {"name": "f", "arguments": ""}}]), True),
        ("chat", delta(tool_calls=[{"function": {"arguments": "{"}}]), True),
        ("completions", b'{"choices":[{"text":"a","index":0}]}', True),
        ("completions", payload({"choices": [{"text": " ", "logprobs": None}]}), True),
        ("chat", delta(role="assistant", content=""), False),
        ("chat", b'{"choices":[{"delta":{"role":"assistant","content":""}}]}', False),
        ("chat", delta(content=None), False),
        ("chat", delta(), False),
        ("completions", b'{"choices":[{"text":"","finish_reason":"stop"}]}', False),
        ("chat", payload({"choices": [], "usage": {"completion_tokens": 3}}), False),
    ],
)
def test_only_events_with_text_count(endpoint, data, expected):
    """An event counts where it brings text, reasoning or a part of a tool call, in compact and in spaced JSON."""
    _, answer = read(data, endpoint=endpoint)

    assert bool(answer.event_ns) is expected


def test_words_of_the_protocol_inside_text_change_nothing():
    """Text that looks like a key, an error, usage or [DONE] is text."""
    words = [
        '"usage":{"completion_tokens":9}',
        "error",
        '{"error":{"message":"x"}}',
        "[DONE]",
        '"finish_reason":"stop"',
    ]

    reader, answer = read(*(delta(content=word) for word in words))

    assert len(answer.event_ns) == len(words)
    assert (reader.fault, reader.is_done) == (None, False)
    assert (answer.completion_tokens, answer.finish_reason) == (None, None)


def test_usage_and_finish_reason_are_kept():
    """The final chunks tell tokens, cached tokens and why the answer ended; null usage before them tells nothing."""
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}

    reader, answer = read(
        payload({"choices": [{"delta": {"content": "a"}, "finish_reason": None}], "usage": None}),
        payload({"choices": [{"delta": {}, "finish_reason": "length"}], "usage": None}),
        payload({"choices": [], "usage": usage}),
        b"[DONE]",
    )

    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (9, 2, 8)
    assert answer.finish_reason == "length"
    assert reader.is_done


def test_continuous_usage_tells_tokens_from_events():
    """With usage in each event, each event's tokens are known."""
    chunks = [
        {"choices": [{"delta": {"content": "ab"}}], "usage": {"prompt_tokens": 4, "completion_tokens": count}}
        for count in (2, 3, 6)
    ]

    _, answer = read(*map(payload, chunks), payload({"choices": [], "usage": {"completion_tokens": 6}}))

    assert answer.event_tokens.tolist() == [2, 3, 6]
    assert answer.completion_tokens == 6


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"error": {"message": "out of blocks", "type": "server_error"}}, "out of blocks"),
        ({"error": "out of blocks"}, "out of blocks"),
        ({"object": "error", "message": "out of blocks"}, "out of blocks"),
        ({"error": {"code": 5}}, "{'error': {'code': 5}}"),
    ],
)
def test_a_fault_in_the_stream_is_found(fields, message):
    """An error event in any of the usual shapes is a fault, with its message."""
    reader, _ = read(delta(content="a"), payload(fields))

    assert reader.fault == message


def test_a_null_error_is_none():
    """Servers that put a null error into each event report no fault."""
    reader, answer = read(payload({"choices": [{"delta": {"content": "a"}}], "error": None}))

    assert (reader.fault, len(answer.event_ns)) == (None, 1)


def test_a_plain_message_of_a_refusal():
    """Validation errors that hold a text only under detail are shown by it."""
    assert message_of({"detail": "Not Found"}) == "Not Found"


def exchange(*reads, eof_s=None):
    """A request due at second 10, sent at 12, whose answer is read in the given (time, bytes) pieces."""
    made = HttpExchange(Ticket(index=0, process=0, intended_s=10.0, lag_s=0.0), "chat", origin_s=100.0)
    made.begin(112.0, connect_s=None)
    for at_s, data in reads:
        made.feed(data, 112.0 + at_s)
    if eof_s is not None:
        made.feed_eof(112.0 + eof_s)
    return made


FINISH = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})


def test_a_finished_stream_without_done_is_whole():
    """Some servers end the body after the finish reason; without one, or with the connection, an end is a cut."""
    whole = exchange((1, HEAD + chunk(content() + FINISH)), (2, END)).sample()
    unbounded = exchange((1, UNBOUNDED + content() + FINISH), eof_s=2).sample()

    assert (whole.error_name, whole.end_s, whole.answer.finish_reason) == ("", pytest.approx(14.0), "stop")
    assert unbounded.error_name == "cut"


REFUSAL = b'HTTP/1.1 429 Busy\r\nContent-Length: 33\r\n\r\n{"error":{"message":"too busy!"}}'
BARE = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 4\r\n\r\noops"
JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
UNBOUNDED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


@pytest.mark.parametrize(
    ("reads", "expected"),
    [
        ([], ("disconnect", "closed before an answer")),
        ([(1, HEAD)], ("cut", "the connection ended inside the answer")),
        ([(1, HEAD + chunk(content()))], ("cut", "the connection ended inside the answer")),
        ([(1, HEAD + chunk(content()) + END)], ("cut", "the body ended without its last event")),
        ([(1, UNBOUNDED + content())], ("cut", "the body ended without its last event")),
        ([(1, HEAD + chunk(content() + event({"error": {"message": "boom"}})))], ("error_event", "boom")),
        ([(1, REFUSAL)], ("http_429", "too busy!")),
        ([(1, BARE)], ("http_502", "oops")),
        ([(1, JSON)], ("protocol", "an answer of type application/json, not an event stream")),
        ([(1, b"HELO\r\n\r\n")], ("protocol", "not an HTTP/1.1 answer: b'HELO'")),
        ([(1, HEAD + chunk(event(b'{"error"')))], ("protocol", """an event that is not JSON: b'{"error"'""")),
    ],
)
def test_each_kind_of_failure_is_told_apart(reads, expected):
    """What went wrong is named, with a sentence, and the connection is not used again unless the answer was whole."""
    sample = exchange(*reads, eof_s=2).sample()

    assert (sample.error_name, sample.detail) == expected


def test_times_of_an_answer():
    """Each time counts from where it should: events and first byte from the send, the end from the start of the run."""
    role = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})

    ended = exchange(
        (0.5, HEAD), (1.0, chunk(role)), (1.5, chunk(content())), (2.5, chunk(content())), (3.0, chunk(finish()) + END)
    )

    sample = ended.sample()
    assert sample.is_ok
    assert (sample.intended_s, sample.sent_s, sample.end_s) == (10.0, 12.0, 15.0)
    assert sample.answer.first_byte_ns == 1_000_000_000
    assert sample.answer.event_ns.tolist() == [1_500_000_000, 2_500_000_000]


def test_the_answer_ends_at_done_and_the_connection_with_the_body():
    """[DONE] is the end that counts; the connection is over when the last chunk has come."""
    made = exchange((1.0, HEAD + chunk(content() + finish())))
    assert (made.is_ended, made.is_over, made.can_reuse_connection) == (True, False, False)

    made.feed(END, 115.0)

    assert (made.is_over, made.can_reuse_connection) == (True, True)
    assert made.sample().end_s == 13.0


def test_a_connection_is_kept_after_a_refusal_but_not_after_a_fault():
    """A whole refusal leaves the connection in step; a fault inside a stream does not."""
    fault = HEAD + chunk(event({"error": {"message": "boom"}}))

    assert exchange((1, REFUSAL)).can_reuse_connection
    assert not exchange((1, fault)).can_reuse_connection


def test_a_body_without_length_may_end_with_the_connection():
    """An HTTP/1.0 way of ending a stream is no failure once [DONE] was there."""
    sample = exchange((1, UNBOUNDED + content() + finish()), eof_s=2).sample()

    assert (sample.error, sample.end_s) == (None, 13.0)


def test_one_read_or_a_read_for_each_byte():
    """The record does not depend on how the network cut the answer."""
    data = b"".join(piece for _, piece in stream([0.0] * 5))

    whole = exchange((1, data)).sample()
    bytewise = exchange(*((1, data[i : i + 1]) for i in range(len(data)))).sample()

    assert whole == bytewise
    assert whole.answer.completion_tokens == len(whole.answer.event_ns) == 5


def test_the_first_failure_stands():
    """A timeout that is followed by the end of the connection is a timeout."""
    made = exchange()
    made.fail(ErrorKind.TIMEOUT, "late", 113.0)
    made.feed_eof(114.0)

    assert (made.sample().error, made.sample().end_s) == (ErrorKind.TIMEOUT, 13.0)
