"""Builders for the command line's tests: a scripted server on loopback, and a folder with a tiny model."""

import json
import shutil
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TINY_TOKENIZER = Path(__file__).parents[1] / "data" / "tiny_tokenizer"

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def model_folder(path: Path, *, shape: tuple[int, int] = (4, 8), **config: Any) -> Path:
    """A Hugging Face folder with a tokenizer and one float32 tensor of ``shape``."""
    path.mkdir(parents=True)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY_TOKENIZER / file, path)
    (path / "config.json").write_text(json.dumps(LLAMA | config))
    num_bytes = 4 * shape[0] * shape[1]
    tensor = {"dtype": "F32", "shape": shape, "data_offsets": [0, num_bytes]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "x": tensor}).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(num_bytes))
    return path


class StubServer:
    """Answers chat completions with what it was given; ``hold`` makes it wait after the first piece.

    bodies: what was asked, headers: of the newest request. gone: set once a held client has left.
    """

    def __init__(self) -> None:
        self.pieces: list[str] = ["Hello", " there", "."]
        self.error: tuple[int, bytes] | None = None
        self.is_broken_off = False
        self.hold = False
        self.bodies: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}
        self.gone = threading.Event()
        self.url = ""


@contextmanager
def stub_server() -> Iterator[StubServer]:
    stub = StubServer()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            self._send(200, json.dumps({"data": [{"id": "stub-model"}]}).encode())

        def do_POST(self) -> None:
            stub.headers = dict(self.headers)
            stub.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if stub.error is not None:
                self._send(*stub.error)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self._event({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
            self.wfile.write(b": keep-alive\n\n")
            for piece in stub.pieces:
                self._event({"choices": [{"index": 0, "delta": {"content": piece}}]})
                if stub.hold:
                    while self.connection.recv(1):  # b"" once the client has closed
                        pass
                    stub.gone.set()
                    return
            if not stub.is_broken_off:
                self._event({"choices": [], "usage": {"completion_tokens": len(stub.pieces)}})
                self.wfile.write(b"data: [DONE]\n\n")

        def _event(self, event: dict[str, Any]) -> None:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        stub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield stub
        finally:
            server.shutdown()
            thread.join()
