"""A server in a process of its own, and plain blocking clients for it."""

import http.client
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("scripted_process.py")
ROOT = SCRIPT.parents[2]


class Process:
    """What runs, where it listens, and how it ended."""

    def __init__(self, child: "subprocess.Popen[str]", port: int) -> None:
        self.child, self.port = child, port

    def signal(self, number: signal.Signals) -> None:
        self.child.send_signal(number)

    def exit_status(self, within_s: float) -> int:
        return self.child.wait(within_s)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            content = {"Content-Type": "application/json"} if body is not None else {}
            connection.request(method, path, None if body is None else json.dumps(body), {**content, **headers})
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        finally:
            connection.close()

    def complete(self, **wanted: Any) -> tuple[int, dict[str, str], bytes]:
        return self.ask("POST", "/v1/completions", {"prompt": "hi", "max_tokens": 4, **wanted})

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def raw(self, sent: bytes) -> bytes:
        """All that comes back until the server closes the connection."""
        with self.connect() as sock:
            sock.sendall(sent)
            received = b""
            try:
                while part := sock.recv(65536):
                    received += part
            except ConnectionResetError:
                pass
            return received

    def cpu_s(self) -> float:
        """CPU time of all its threads so far."""
        tasks = Path(f"/proc/{self.child.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


@contextmanager
def serving(
    *arguments: str, runner: dict[str, Any] | None = None, num_files: int = 0, **environment: str
) -> Iterator[Process]:
    """Start it, wait until it says that it is ready, and make sure that it is gone at the end."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, num_files))

    clean = {name: value for name, value in os.environ.items() if not name.startswith("ASERVE_")}
    child = subprocess.Popen(
        [sys.executable, str(SCRIPT), json.dumps(runner or {}), "--server.port", "0", *arguments],
        env={**clean, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=limit if num_files else None,
    )
    try:
        assert child.stdout is not None
        line = child.stdout.readline()
        found = re.search(r"ready at http://127\.0\.0\.1:(\d+)", line)
        assert found, f"it said {line!r}"
        yield Process(child, int(found[1]))
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


class Background:
    """A call in a thread; its result or its exception."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._result = call()
        except BaseException as error:
            self._error = error

    def result(self, within_s: float = 20.0) -> Any:
        self._thread.join(within_s)
        assert not self._thread.is_alive(), "it is still at it"
        if self._error is not None:
            raise self._error
        return self._result


def until(condition: Callable[[], object], within_s: float = 10.0) -> None:
    """Poll another process, which has no way to tell."""
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, "It never came true."
        time.sleep(0.01)
