"""Who answers in ``chat``: an engine in this process, or a server that speaks OpenAI's chat completions."""

import asyncio
import contextlib
import http.client
import json
import sys
import threading
from collections.abc import Coroutine, Generator, Iterator
from dataclasses import replace
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import uvloop

from aserve import __version__
from aserve.cli.chat import Sampling
from aserve.config import Config
from aserve.embedding import Engine, Generation
from aserve.engine.generation import Delta
from aserve.errors import AserveError, ConfigError, ContextLengthExceeded, ModelError

T = TypeVar("T")

_CONNECT_S: Final = 10.0
_SILENCE_S: Final = 600.0
"""A server may compute a long prompt in silence; ours sends comments meanwhile."""
_LINE_BYTES_MAX: Final = 1 << 20


# --- in this process


class LoopThread:
    """An event loop in a thread of its own, for a program whose main thread belongs to the terminal."""

    def __init__(self) -> None:
        self._is_ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="aserve-loop", daemon=True)

    def __enter__(self) -> "LoopThread":
        self._thread.start()
        self._is_ready.wait()
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._loop is not None and self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it on the loop and wait. Ctrl-C cancels it there and is raised here."""
        assert self._loop is not None
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._until_stopped())

    async def _until_stopped(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._is_ready.set()
        await self._stop.wait()


class EngineModel:
    """An embedded engine behind a blocking iterator."""

    def __init__(self, engine: Engine, loop: LoopThread) -> None:
        self._engine = engine
        self._loop = loop
        self.about = f"{engine.name} on {engine.info.device}"
        self.num_reply_tokens = 0

    def reply(self, messages: list[dict[str, str]], sampling: Sampling) -> Generator[str]:
        generation = self._engine.generate(
            messages, max_tokens=sampling.max_tokens, temperature=sampling.temperature, seed=sampling.seed
        )
        try:
            while (delta := self._loop.call(_next(generation))) is not None:
                if delta.text:
                    yield delta.text
        finally:
            self._loop.call(generation.aclose())
            self.num_reply_tokens = generation.usage.completion_tokens


async def _next(generation: Generation) -> Delta | None:
    return await anext(generation, None)


@contextlib.contextmanager
def open_engine(config: Config) -> Iterator[EngineModel]:
    """Load the model into this process. Raises ConfigError and ModelError; says on standard error what it waits for.

    A conversation is one sequence: unless its number was set, there is one slot, and a pool for one context.
    """
    if "scheduler.max_num_seqs" not in config.origins:
        config = replace(config, scheduler=replace(config.scheduler, max_num_seqs=1))
    if sys.stderr.isatty():
        sys.stderr.write("aserve: loading the model\n")
    with LoopThread() as loop:
        engine = Engine.from_config(config, progress=True)
        loop.call(engine.__aenter__())
        try:
            yield EngineModel(engine, loop)
        finally:
            loop.call(engine.aclose())


# --- on a server


class ServerModel:
    """A server's chat completions, streamed. A connection a reply: closing it is how a reply is stopped."""

    def __init__(self, base_url: str, *, api_key: str, model: str) -> None:
        url = urlsplit(base_url if "://" in base_url else f"http://{base_url}")
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError(f"--base-url {base_url!r} is no http or https address.")
        try:
            self._port = url.port
        except ValueError:
            raise ConfigError(f"--base-url {base_url!r} has no valid port.") from None
        self._host, self._is_tls = url.hostname, url.scheme == "https"
        self._prefix = url.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Content-Type": "application/json", "User-Agent": f"aserve-chat/{__version__}"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._address = f"{url.scheme}://{url.netloc.rpartition('@')[2]}"
        self._model = model or self._first_model()
        self.about = f"{self._model} at {self._address}"
        self.num_reply_tokens = 0

    def reply(self, messages: list[dict[str, str]], sampling: Sampling) -> Generator[str]:
        wanted = {
            "model": self._model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
        }
        self.num_reply_tokens = 0
        body = json.dumps({key: value for key, value in wanted.items() if value is not None})
        with self._request("POST", "/chat/completions", body) as response:
            while line := response.readline(_LINE_BYTES_MAX):
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise _error_of(event)
                if usage := event.get("usage"):
                    self.num_reply_tokens = usage.get("completion_tokens", 0)
                for choice in event.get("choices", ()):
                    if text := choice.get("delta", {}).get("content"):
                        yield text
            raise AserveError("The server's answer broke off.")

    def _first_model(self) -> str:
        try:
            with self._request("GET", "/models") as response:
                return str(json.loads(response.read())["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise ModelError(f"The server at {self._address} names no model; name one with --model.") from error
        except AserveError as error:
            raise ModelError(error.message) from error

    @contextlib.contextmanager
    def _request(self, method: str, path: str, body: str | None = None) -> Iterator[http.client.HTTPResponse]:
        """The response, if it is a good one. Raises AserveError for everything else, in the server's own words."""
        kind = http.client.HTTPSConnection if self._is_tls else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=_CONNECT_S)
        try:
            connection.connect()
            connection.sock.settimeout(_SILENCE_S)
            connection.request(method, self._prefix + path, body, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _error_of_body(response)
            yield response
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise AserveError(f"The server at {self._address} does not answer: {reason}.") from error
        except ValueError as error:
            raise AserveError(f"The server at {self._address} does not answer in JSON.") from error
        finally:
            connection.close()


def open_server(base_url: str, *, api_key: str, model: str) -> contextlib.AbstractContextManager[ServerModel]:
    """A server's model; its first one if none is named. Raises ConfigError and ModelError."""
    return contextlib.nullcontext(ServerModel(base_url, api_key=api_key, model=model))


def _error_of_body(response: http.client.HTTPResponse) -> AserveError:
    try:
        return _error_of(json.loads(response.read(_LINE_BYTES_MAX)))
    except (ValueError, AttributeError):
        return AserveError(f"The server answers with {response.status} {response.reason}.")


def _error_of(body: dict[str, Any]) -> AserveError:
    """The server's error object as an exception. Some servers send a string, some have no code."""
    error = body.get("error", body)
    if not isinstance(error, dict):
        return AserveError(str(error))
    message = str(error.get("message") or "The server gives no reason.")
    return ContextLengthExceeded(message) if error.get("code") == ContextLengthExceeded.code else AserveError(message)
