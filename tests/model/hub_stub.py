"""A model hub on loopback, as far as the hub's own client asks of it."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL_FILES = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"[]"}


@dataclass(kw_only=True)
class StubHub:
    """One public, one gated and no other model; notes every request as (method, path, authorization)."""

    endpoint: str = ""
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    files: dict[str, bytes] = field(
        default_factory=lambda: (
            MODEL_FILES
            | {
                "chat_template.jinja": b"{{ messages }}",
                "pytorch_model.bin": b"pickle",
                "consolidated.safetensors": b"twice",
                "original/weights.safetensors": b"thrice",
                "README.md": b"words",
            }
        )
    )

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for a GET or HEAD of ``path``."""
        path = path.partition("?")[0]
        commit = "c0ffee" + "0" * 34
        if "org/gated" in path:
            return 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."}, b""
        if "org/tiny" not in path:
            return 404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}, b""
        match = re.fullmatch(
            r"/api/models/org/tiny(?:/(?:revision|tree)/([^/]+))?|/org/tiny/resolve/([^/]+)/(.+)", path
        )
        if match is None or (match[1] or match[2] or "main") not in ("main", "v1", commit):
            return 404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"}, b""
        if match[3]:
            etag = hashlib.sha1(self.files[match[3]]).hexdigest()
            return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": commit}, self.files[match[3]]
        if "/tree/" in path:
            entries = [
                {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                for name, body in self.files.items()
            ]
            return 200, {"Content-Type": "application/json"}, json.dumps(entries).encode()
        siblings = [{"rfilename": name} for name in self.files]
        body = {"_id": "1", "id": "org/tiny", "modelId": "org/tiny", "sha": commit, "siblings": siblings}
        return 200, {"Content-Type": "application/json"}, json.dumps(body).encode()

    def fetched(self) -> set[str]:
        """The names of the files that were downloaded."""
        return {path.rpartition("/")[2] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path}


@contextmanager
def serving_hub() -> Iterator[StubHub]:
    """A stub that answers on loopback for the length of the ``with`` block."""
    stub = StubHub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            stub.requests.append((self.command, self.path, self.headers.get("Authorization", "")))
            status, headers, body = stub.answer(self.path)
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Quiet: the requests are noted."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        stub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield stub
        finally:
            server.shutdown()
            thread.join()
