"""Every wire against the package's own scripted server, over loopback."""

import asyncio
from contextlib import asynccontextmanager
from time import perf_counter

import pytest
from loadgen_stub import loopback_server

from loadgen import probe
from loadgen.alarm import LoopAlarm, TimerfdAlarm, best_alarm
from loadgen.client import Client, parse_target
from loadgen.errors import LoadgenError, WireError
from loadgen.exchange import Ticket
from loadgen.stub import Script, Stub, Wire
from loadgen.work import Ask, Behaviour, BodyTemplate
from loadgen.ws_parser import FrameParser, Opcode, accept_of, client_frame, server_frame

SCRIPT = Script(ttft_ms=2, gap_ms=1)


@asynccontextmanager
async def stub_server(script=SCRIPT):
    """Serve the script on loopback and give the base URL."""
    alarm = best_alarm(perf_counter)
    stub = Stub(script, alarm)
    server = await asyncio.get_running_loop().create_server(lambda: Wire(stub), "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    alarm.close()


async def send(base_url, endpoint, *, num_requests=1, template=None, **ticket):
    """Send requests for six tokens one after another and return their exchanges."""
    template = template or BodyTemplate(model="stub", endpoint=endpoint, max_tokens=6)
    client = Client(
        parse_target(base_url, endpoint, api_key=None, headers={}), endpoint, timeout_s=5.0, connect_timeout_s=5.0
    )
    body = template.body(Ask(messages=({"role": "user", "content": "one two three"},)))
    tickets = [
        Ticket(index=i, process=0, intended_s=0.0, lag_s=0.0, is_streamed=template.is_streamed, **ticket)
        for i in range(num_requests)
    ]
    try:
        return [await client.send(body, each, origin_s=0.0) for each in tickets]
    finally:
        await client.aclose()


@pytest.mark.parametrize("endpoint", ["chat", "completions", "responses", "responses-ws"])
async def test_every_wire_brings_every_token(endpoint):
    """Six tokens are six events, usage is read, the text is kept, and the connection serves the next request."""
    async with stub_server() as base_url:
        exchanges = await send(base_url, endpoint, num_requests=2, keeps_text=True)

    samples = [exchange.sample() for exchange in exchanges]
    assert [s.error_name for s in samples] == ["", ""]
    assert [len(s.answer.event_ns) for s in samples] == [6, 6]
    assert {s.answer.completion_tokens for s in samples} == {6}
    assert all(s.answer.prompt_tokens for s in samples)
    assert [s.connect_s is None for s in samples] == [False, True]
    assert exchanges[0].text() == "word1 word2 word3 word4 word5 word6 "


@pytest.mark.parametrize("endpoint", ["chat", "completions", "responses"])
async def test_an_answer_that_is_not_streamed(endpoint):
    """One JSON object is one event with usage and text."""
    template = BodyTemplate(model="stub", endpoint=endpoint, max_tokens=6, is_streamed=False)
    async with stub_server() as base_url:
        (exchange,) = await send(base_url, endpoint, template=template, keeps_text=True)

    sample = exchange.sample()
    assert sample.error_name == ""
    assert (len(sample.answer.event_ns), sample.answer.completion_tokens) == (1, 6)
    assert exchange.text().startswith("word1 word2")


@pytest.mark.parametrize("endpoint", ["chat", "responses-ws"])
@pytest.mark.parametrize("num_tokens", [0, 3])
async def test_a_client_that_leaves(endpoint, num_tokens):
    """Who is told to leave does so after that many tokens, without an error, and never reuses the connection."""
    async with stub_server(Script(ttft_ms=50, gap_ms=1)) as base_url:
        exchanges = await send(base_url, endpoint, num_requests=2, behaviour=Behaviour(abort_after_tokens=num_tokens))

    samples = [exchange.sample() for exchange in exchanges]
    assert [(s.is_aborted, s.error_name) for s in samples] == [(True, "")] * 2
    assert all(s.connect_s is not None for s in samples)
    assert all(num_tokens <= len(s.answer.event_ns) <= num_tokens + 2 for s in samples)


async def test_a_slow_reader_takes_its_time():
    """At 20,000 bytes a second an answer of some kilobytes takes its share of a second, on a connection of its own."""
    async with stub_server(Script(ttft_ms=0, gap_ms=0)) as base_url:
        template = BodyTemplate(model="stub", endpoint="chat", max_tokens=30)
        quick, slow = [
            (await send(base_url, "chat", template=template, behaviour=behaviour))[0].sample()
            for behaviour in (Behaviour(), Behaviour(read_bytes_per_s=20_000))
        ]

    assert slow.error_name == ""
    assert slow.end_s - slow.sent_s > 0.8 * slow.answer.num_bytes / 20_000 - 0.25
    assert quick.end_s - quick.sent_s < slow.end_s - slow.sent_s


async def test_an_expected_refusal_is_a_success():
    """Nonsense that is refused as expected succeeds; an answer where a refusal was expected does not."""
    behaviour = Behaviour(expect_status=400)
    async with stub_server() as base_url:
        client = Client(
            parse_target(base_url, "chat", api_key=None, headers={}), "chat", timeout_s=5.0, connect_timeout_s=5.0
        )
        ticket = Ticket(index=0, process=0, intended_s=0.0, lag_s=0.0, behaviour=behaviour)
        samples = [(await client.send(body, ticket, origin_s=0.0)).sample() for body in (b"{", b'{"stream":true}')]
        await client.aclose()

    assert [s.error_name for s in samples] == ["", "http_200"]


async def test_a_refused_handshake_is_named():
    """A server without websockets is a failed request that says so."""

    async def nothing(writer):
        pass

    async with loopback_server(nothing) as server:
        (exchange,) = await send(server.base_url, "responses-ws")

    assert exchange.sample().error_name == "handshake"
    assert "answered with 404" in exchange.sample().detail


async def test_pings_are_answered_between_requests():
    """A server that looks after its idle sockets hears from them."""
    heard = asyncio.get_running_loop().create_future()

    async def serve(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        key = head.partition(b"Sec-WebSocket-Key: ")[2].partition(b"\r\n")[0]
        accept = accept_of(key).encode()
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nSec-WebSocket-Accept: %b\r\n\r\n" % accept)
        parser = FrameParser(is_server=True)
        while not parser.feed(await reader.read(4096)):
            pass
        writer.write(server_frame(Opcode.TEXT, b'{"type":"response.completed","response":{}}'))
        writer.write(server_frame(Opcode.PING, b"still there?"))
        while not (frames := parser.feed(await reader.read(4096))):
            pass
        heard.set_result(frames)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        target = parse_target(
            f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "responses-ws", api_key=None, headers={}
        )
        client = Client(target, "responses-ws", timeout_s=5.0, connect_timeout_s=5.0)
        await client.send(b"{}", Ticket(index=0, process=0, intended_s=0.0, lag_s=0.0), origin_s=0.0)
        frames = await heard
        await client.aclose()

    assert frames == [(Opcode.PONG, b"still there?")]


@pytest.mark.parametrize("is_server", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1 << 20])
def test_frames_are_read_however_they_are_split(is_server, size):
    """Short, middle and long messages, fragments and a ping between them come out whole, with and without masks."""

    def frame(opcode, payload):
        mask = b"\x01\x80\xff\x7e"
        return client_frame(opcode, payload, mask) if is_server else server_frame(opcode, payload)

    begun = bytearray(frame(Opcode.TEXT, b"frag"))
    begun[0] &= 0x7F
    sent = [(Opcode.TEXT, b"x" * n) for n in (0, 125, 126, 65_536)]
    data = b"".join(frame(*each) for each in sent)
    data += bytes(begun) + frame(Opcode.PING, b"?") + frame(Opcode.CONTINUATION, b"ment")
    parser = FrameParser(is_server=is_server)

    step = size if size > 100 else size * 499
    read = [each for at in range(0, len(data), step) for each in parser.feed(data[at : at + step])]

    assert read == [*sent, (Opcode.PING, b"?"), (Opcode.TEXT, b"fragment")]


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (client_frame(Opcode.TEXT, b"a", b"mask"), "a mask from a server"),
        (b"\xc1\x00", "reserved bits"),
        (b"\x83\x00", "unknown kind 3"),
        (b"\x09\x00", "control frame that is split"),
        (b"\x80\x00", "fragment out of order"),
        (b"\x81\x7f" + (1 << 40).to_bytes(8), "a frame of more than"),
    ],
)
def test_frames_that_no_server_may_send(data, complaint):
    """What breaks the protocol is named."""
    with pytest.raises(WireError, match=complaint):
        FrameParser().feed(data)


async def test_the_server_counts_the_tokens_of_our_words():
    """Two prompts of different length give the tokens of a word and those of the template."""
    async with stub_server() as base_url:
        target = parse_target(base_url, "chat", api_key=None, headers={})
        template = BodyTemplate(model="stub", endpoint="chat", max_tokens=5)
        found = await asyncio.to_thread(probe.calibrate, target, template, "en")
        model = await asyncio.to_thread(probe.first_model, target)

    assert model == "stub"
    assert found.tokens_per_word == pytest.approx(1.0)
    assert 0 <= found.overhead_tokens < 10
    assert found.words(100) == 100 - round(found.overhead_tokens)


async def test_a_server_that_counts_nothing_cannot_be_calibrated():
    """Where neither usage nor /tokenize answers, lengths have to be in words, and the message says so."""

    async def answer(writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        writer.close()

    async with loopback_server(answer) as server:
        target = parse_target(server.base_url, "chat", api_key=None, headers={})
        with pytest.raises(LoadgenError, match="give lengths in words"):
            await asyncio.to_thread(
                probe.calibrate, target, BodyTemplate(model="m", endpoint="chat", max_tokens=5), "en"
            )


METRICS = """# HELP aserve_request_queue_time_seconds From arrival to the first step.
aserve_request_queue_time_seconds_bucket{{le="0.1"}} {0}
aserve_request_queue_time_seconds_bucket{{le="1.0"}} {1}
aserve_request_queue_time_seconds_bucket{{le="+Inf"}} {1}
aserve_request_queue_time_seconds_sum {2}
aserve_request_queue_time_seconds_count {1}
vllm:request_queue_time_seconds_sum{{model_name="m"}} 99
vllm:request_queue_time_seconds_count{{model_name="m"}} 99
"""


def test_queue_times_are_those_between_two_looks():
    """What the server's histogram held before the run is left out; percentiles interpolate within a bucket."""
    before = probe.parse_queue_histogram(METRICS.format(10, 10, 0.5))
    after = probe.parse_queue_histogram(METRICS.format(60, 110, 30.5))

    found = probe.queue_between(before, after)

    assert found["count"] == 100
    assert found["mean_ms"] == pytest.approx(300)
    assert found["p50_ms"] == pytest.approx(100)
    assert found["p99_ms"] == pytest.approx(982)
    assert probe.queue_between(after, after) == {}
    assert probe.parse_queue_histogram("nothing 1\n") is None


@pytest.mark.parametrize("make", [TimerfdAlarm, lambda clock: LoopAlarm()], ids=["timerfd", "loop"])
async def test_sleepers_wake_in_their_order_and_not_early(make):
    """Whoever is due first wakes first, nobody before its time; waking all ends every sleep."""
    alarm = make(perf_counter)
    began_s, woken = perf_counter(), []

    async def sleeper(delay_s):
        await alarm.sleep(delay_s)
        woken.append((delay_s, perf_counter() - began_s))

    async with asyncio.TaskGroup() as group:
        for delay_s in (0.03, 0.01, 0.02):
            group.create_task(sleeper(delay_s))
    async with asyncio.TaskGroup() as group:
        group.create_task(alarm.sleep(3600))
        await asyncio.sleep(0)
        alarm.wake_all()
    alarm.close()

    assert [delay for delay, _ in woken] == [0.01, 0.02, 0.03]
    assert all(after_s >= delay_s - 0.001 for delay_s, after_s in woken)


@pytest.mark.parametrize("at_s", [0.0, 0.5, 1.0, 2.5])
def test_the_stall_of_a_script_moves_what_comes_after_it(at_s):
    """Work before the stall is on time, work after it is late by the stall, and both directions agree."""
    script = Script(ttft_ms=1, gap_ms=1, stall_at_s=1.0, stall_s=3.0)

    assert script.when(at_s) == (at_s if at_s < 1.0 else at_s + 3.0)
    assert script.worked(script.when(at_s)) == at_s
    assert script.worked(2.0) == 1.0
