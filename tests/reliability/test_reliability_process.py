"""A process: signals, a lost device, descriptors, a full disk, idling, and both of aiohttp's parsers."""

import json
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from process_builders import Background, Process, serving, until

SLOW = {"step_time_s": 0.01}


def stats(process: Process) -> dict[str, Any]:
    return json.loads(process.ask("GET", "/v1/stats")[2])


def streams(process: Process, count: int, **wanted: Any) -> list[Background]:
    calls = [Background(lambda: process.complete(stream=True, **wanted)) for _ in range(count)]
    until(lambda: stats(process)["engine"]["num_streams"] == count)
    return calls


def test_sigterm_lets_what_was_taken_finish() -> None:
    """Running and waiting clients; new work gets a 503 or finds nobody; the exit is clean and in time."""
    with serving("--scheduler.max_num_seqs", "3", runner=SLOW) as process:
        calls = streams(process, 5, max_tokens=60)
        process.signal(signal.SIGTERM)
        until(lambda: is_draining(process))
        late = []
        while process.child.poll() is None:
            try:
                late.append(process.complete()[:2])
            except (ConnectionError, TimeoutError):
                break
        bodies = [call.result()[2] for call in calls]

        assert all(body.endswith(b"data: [DONE]\n\n") for body in bodies)
        assert [body.count(b'"text":"x') for body in bodies] == [60] * 5
        assert all(status == 503 and "retry-after" in headers for status, headers in late)
        assert process.exit_status(5) == 0


def test_a_drain_that_takes_too_long_ends_with_events() -> None:
    """What still runs at the limit gets a last event without [DONE], once, and the process is gone right after it."""
    with serving("--server.drain_timeout_s", "0.3", runner=SLOW) as process:
        (call,) = streams(process, 1, max_tokens=10_000)
        start_s = time.monotonic()
        process.signal(signal.SIGTERM)
        status = process.exit_status(5)
        body = call.result()[2]

        assert status == 0 and time.monotonic() - start_s < 2.5
        assert b"server_draining" in body and b"[DONE]" not in body


def test_a_second_signal_does_not_wait() -> None:
    """Ctrl-C twice: connections are cut and the process ends."""
    with serving(runner=SLOW) as process:
        streams(process, 2, max_tokens=10_000)
        process.signal(signal.SIGINT)
        until(lambda: is_draining(process))
        process.signal(signal.SIGINT)

        assert process.exit_status(3) == 0


def is_draining(process: Process) -> bool:
    """Whether the first signal has been taken."""
    try:
        return process.ask("GET", "/ready")[0] == 503
    except OSError:
        return True


def test_a_lost_device_ends_the_process() -> None:
    """Everybody is told, and the exit is not zero, so that whoever supervises it starts another."""
    with serving(runner={**SLOW, "lost_at": 20}) as process:
        calls = [Background(lambda: process.complete(stream=True, max_tokens=1000)) for _ in range(5)]
        answers = [call.result() for call in calls]

        assert process.exit_status(5) == 1
        assert all(status == 500 or b'"error"' in body for status, _, body in answers)
        assert not any(b"[DONE]" in body for _, _, body in answers)


def test_there_is_one_process_and_it_idles() -> None:
    """No child could outlive it; and without requests it waits for events instead of polling."""
    with serving() as process:
        process.complete()
        children = [
            child
            for task in Path(f"/proc/{process.child.pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
        before_s, start_s = process.cpu_s(), time.monotonic()
        time.sleep(2.0)
        share = (process.cpu_s() - before_s) / (time.monotonic() - start_s)

        assert children == []
        assert share < 0.1  # polling would take a whole core; soak.py measures the hundredth, on an idle machine


def test_more_connections_than_descriptors() -> None:
    """The cap lies below the limit: who is over it is told so, nothing spins, and with room again all is well."""
    with serving(num_files=128) as process:
        sockets: list[socket.socket] = []
        try:
            before_s, start_s = process.cpu_s(), time.monotonic()
            sockets = [process.connect() for _ in range(300)]
            refused = []
            for each in sockets[100:110]:
                try:
                    refused.append(each.recv(12))
                except ConnectionResetError:
                    refused.append(b"")
            time.sleep(0.5)
            share = (process.cpu_s() - before_s) / (time.monotonic() - start_s)
        finally:
            for each in sockets:
                each.close()
        until(lambda: process.complete()[0] == 200)

        assert all(answer in (b"HTTP/1.1 503", b"") for answer in refused)
        assert b"HTTP/1.1 503" in refused
        assert share < 0.9


UPGRADE = (
    b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def test_connections_in_the_metrics() -> None:
    """Those that are open, websockets among them, and those sent away; the model has the name that clients use."""
    with serving("--limits.max_connections", "8", "--model.served_model_name", "ours") as process:
        websocket = process.connect()
        websocket.sendall(UPGRADE)
        assert websocket.recv(12) == b"HTTP/1.1 101"
        idle = [process.connect() for _ in range(7)]
        with process.connect() as refused:
            assert refused.recv(12) == b"HTTP/1.1 503"
        for each in idle[1:]:
            each.close()
        lines: list[str] = []

        def has_noticed() -> bool:
            status, _, body = process.ask("GET", "/metrics")
            lines[:] = body.decode().splitlines()
            return status == 200 and "aserve_open_connections 3.0" in lines  # with the one that asks

        until(has_noticed)
        for each in (websocket, idle[0]):
            each.close()

        assert {"aserve_open_websockets 1.0", "aserve_kv_blocks 2048.0"} <= set(lines)
        assert "aserve_connections_refused_total 0.0" not in lines
        assert 'vllm:num_requests_running{engine="0",model_name="ours"} 0.0' in lines
        [cache] = [line for line in lines if line.startswith("vllm:cache_config_info")]
        assert 'num_gpu_blocks="2048"' in cache


@pytest.mark.parametrize("file", ["/dev/full", "log.jsonl"])
def test_a_full_disk_and_secrets(file: str, tmp_path: Path) -> None:
    """A log that cannot be written changes nothing; one that can holds JSON lines without keys, prompts or answers."""
    key, log = "sk-very-secret", tmp_path / file
    options = ["--server.api_keys", key, "--log.file", str(log), "--log.level", "debug", "--log.format", "json"]
    with serving(*options) as process:
        right = {"Authorization": f"Bearer {key}"}
        body = {"prompt": "my private prompt", "max_tokens": 3}
        statuses = [process.ask("POST", "/v1/completions", body, **right)[0] for _ in range(20)]
        wrong = process.ask("POST", "/v1/completions", body, Authorization="Bearer sk-very-wrong")
        forged = process.ask("POST", "/v1/completions", body, **right, **{"X-Request-ID": 'x"},{"level":"error"'})
        page = process.ask("GET", "/metrics")[2]
        process.signal(signal.SIGTERM)

        assert (statuses, wrong[0], forged[0], process.exit_status(5)) == ([200] * 20, 401, 200, 0)
        said = [wrong[2], page, *([] if file == "/dev/full" else [log.read_bytes()])]
        assert not any(word in text for word in (b"sk-very", b"private", b"xxx") for text in said)
        if file != "/dev/full":
            assert len([json.loads(line) for line in log.read_text().splitlines()]) > 20


POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
NOT_HTTP = {
    "signed length": POST + b"Content-Length: +5\r\n\r\n{   }",
    "length with an underscore": POST + b"Content-Length: 0_5\r\n\r\n{   }",
    "two lengths": POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{   }",
    "length and chunks": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{   }\r\n0\r\n\r\n",
    "unknown coding": POST + b"Transfer-Encoding: xchunked\r\n\r\n5\r\n{   }\r\n0\r\n\r\n",
    "NUL in a name": POST + b"X\0Y: 1\r\nContent-Length: 5\r\n\r\n{   }",
    "CR in a name": POST + b"X\rY: 1\r\nContent-Length: 5\r\n\r\n{   }",
    "space before the colon": POST + b"Content-Length : 5\r\n\r\n{   }",
    "two hosts": POST + b"Host: other\r\nContent-Length: 5\r\n\r\n{   }",
    "chunk size in C notation": POST + b"Transfer-Encoding: chunked\r\n\r\n0x5\r\n{   }\r\n0\r\n\r\n",
    "negative chunk": POST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n{   }\r\n0\r\n\r\n",
    "chunk size beyond 64 bits": POST + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n{   }\r\n0\r\n\r\n",
    "line feed in a chunk extension": POST + b"Transfer-Encoding: chunked\r\n\r\n5;a\nb\r\n{   }\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("without_extensions", ["", "1"])
def test_what_could_be_read_in_two_ways_is_refused(without_extensions: str) -> None:
    """Requests that a proxy might part otherwise: 400 and the end of the connection, with aiohttp's parsers in C and
    in Python; the request smuggled behind is never answered."""
    environment = {"AIOHTTP_NO_EXTENSIONS": without_extensions} if without_extensions else {}
    with serving("--limits.body_timeout_s", "1", **environment) as process:
        smuggled = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        # Python's integers do not overflow: there, such a size is just a body that never comes.
        names = [name for name in NOT_HTTP if not (without_extensions and "64 bits" in name)]
        answers = {name: process.raw(NOT_HTTP[name] + smuggled) for name in names}

        assert {name: answer.split(b" ")[1:2] for name, answer in answers.items()} == {
            name: [b"400"] for name in answers
        }
        assert {
            name for name, answer in answers.items() if answer.count(b"HTTP/1.1 ") > 1 or b"version" in answer
        } == set()
        assert process.complete()[0] == 200
