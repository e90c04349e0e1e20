"""The engine inside somebody else's asyncio program: ``from aserve import Engine``. No HTTP, no signals, no exit.

    import asyncio
    from aserve import Engine

    async def main():
        async with Engine.from_pretrained(max_num_seqs=16) as engine:
            chat = [{"role": "user", "content": "Name three rivers."}]
            async for delta in engine.generate(chat, max_tokens=64, temperature=0):
                print(delta.text, end="", flush=True)

    asyncio.run(main())

Importing this loads neither torch nor aiohttp; starting an engine loads torch.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import orjson

from aserve.config import Config, find_keyword, load_config
from aserve.core.request import FinishReason, SamplingParams
from aserve.device.alarm import Alarm
from aserve.device.alarm import is_supported as alarm_is_supported
from aserve.engine.engine import Engine as CoreEngine
from aserve.engine.generation import Delta, Usage
from aserve.engine.ports import Runner, RunnerInfo, Tokenizer
from aserve.engine.statistics import EngineStatistics, Health
from aserve.engine.stream import TokenStream
from aserve.errors import (
    AserveError,
    ConfigError,
    DeadlineExceeded,
    EngineDead,
    GenerationFailed,
    InvalidRequest,
    RequestAborted,
)
from aserve.server.ports import Renderer
from aserve.server.prepare import Prepared, Preparer
from aserve.server.sampling import ModelFacts
from aserve.text.chat_template import ChatTemplate, PromptRenderer

T = TypeVar("T")

Prompt = str | Sequence[int] | Sequence[str] | Sequence[Mapping[str, Any]]
"""A text that is continued as it is, its token ids, several texts, or the messages of a chat."""

SECTIONS: Final = frozenset({"model", "scheduler", "engine"})
"""Sections whose options mean something without a server around the engine."""

_WIRE_ONLY: Final = frozenset({"model", "stream", "stream_options", "echo", "best_of", "return_token_ids"})
"""Fields of the wire that shape its answers, not the generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What an engine is put together from. defaults: the model's own sampling, for fields that are not given."""

    name: str
    runner: Runner
    tokenizer: Tokenizer
    renderer: Renderer
    defaults: SamplingParams


def load_parts(config: Config, *, progress: bool = False) -> Parts:
    """Find the model, fetch it if need be (``progress``: say so on standard error), and load it. Blocks; loads torch.

    Raises ConfigError or ModelError. Sets what holds for the whole process: passive OpenMP waits unless they were set,
    and the interpreter's switch interval.
    """
    from aserve.device.threads import prepare_process
    from aserve.model.hub import resolve_model
    from aserve.text.tokenizer import HFTokenizer

    prepare_process()  # before torch is loaded, which reads the environment once
    source = resolve_model(
        config.model.model,
        cache_dir=config.model.cache_dir,
        load_format="dummy" if config.model.load_format == "dummy" else "auto",
        progress=progress,
    )
    tokenizer = HFTokenizer.from_folder(source.folder)
    template = ChatTemplate.from_folder(source.folder)
    renderer = PromptRenderer(tokenizer, template)
    if template.available:
        template.render([{"role": "user", "content": ""}])  # the renderer itself takes most of a second to load
    from aserve.model.runner import load_runner, sampling_defaults

    runner = load_runner(config.model, config.scheduler, source.folder)
    return Parts(
        name=source.name,
        runner=runner,
        tokenizer=tokenizer,
        renderer=renderer,
        defaults=sampling_defaults(config.model, source.folder),
    )


class Engine:
    """A language model on the loop that starts it. ``async with``, or ``await`` it once and ``aclose`` it later.

    Any number of ``generate`` calls run side by side, batched together. Nothing here exits the process, installs a
    signal handler or prints; every fault is raised, most of them as ``aserve.errors.AserveError``.
    """

    def __init__(self, load: Callable[[], Parts], config: Config) -> None:
        """load: makes the parts in a worker thread at start. The class methods are what programs use."""
        self._load = load
        self._config = config
        self._core: CoreEngine | None = None
        self._preparer: Preparer | None = None
        self._name = ""
        self._was_started = False

    @classmethod
    def from_pretrained(
        cls, model: str = "", *, profile: str = "", config_file: str = "", progress: bool = False, **keywords: Any
    ) -> "Engine":
        """An engine for ``model``: a folder, a GGUF file, a hub id, or the default model.

        keywords: options of the sections [model], [scheduler] and [engine], by key (``max_num_seqs=8``) or as
        ``section__key``. The environment is not read. progress: say on standard error what is being fetched.
        Raises ConfigError at once; the model is looked for at start.
        """
        if model:
            keywords["model"] = model
        return cls.from_config(
            load_config(file=config_file, profile=profile, keywords=_checked(keywords)), progress=progress
        )

    @classmethod
    def from_config(cls, config: Config, *, progress: bool = False) -> "Engine":
        """An engine as a whole configuration says; the sections of server, limits, log and metrics are left alone."""
        return cls(lambda: load_parts(config, progress=progress), config)

    @classmethod
    def from_runner(
        cls,
        runner: Runner,
        tokenizer: Tokenizer,
        *,
        template: ChatTemplate | None = None,
        defaults: SamplingParams | None = None,
        **keywords: Any,
    ) -> "Engine":
        """An engine over a device of the caller's, such as ``aserve.testing.ScriptedRunner``; it closes the runner."""
        info = runner.info
        keywords = {
            "scheduler.max_num_seqs": info.max_num_seqs,
            "scheduler.block_size": info.block_size,
        } | _checked(keywords)
        parts = Parts(
            name=info.model_name,
            runner=runner,
            tokenizer=tokenizer,
            renderer=PromptRenderer(tokenizer, template or ChatTemplate(None)),
            defaults=defaults or SamplingParams(),
        )
        return cls(lambda: parts, load_config(keywords=keywords))

    # --- life

    def __await__(self) -> Generator[Any, None, "Engine"]:
        return self._start().__await__()

    async def __aenter__(self) -> "Engine":
        return await self._start()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def _start(self) -> "Engine":
        """Load in a worker thread. A cancellation is raised once that thread has ended, and leaves nothing behind."""
        if self._was_started:
            raise RuntimeError("an Engine is started once")
        self._was_started = True
        loading = asyncio.ensure_future(asyncio.to_thread(self._load))
        try:
            parts = await _to_its_end(loading)
        except asyncio.CancelledError:
            if not loading.cancelled() and loading.exception() is None:
                await loading.result().runner.aclose()
            raise
        core = CoreEngine(
            parts.runner,
            parts.tokenizer,
            self._config.scheduler,
            self._config.engine,
            make_alarm=Alarm if alarm_is_supported() else None,
        )
        limits = self._config.limits
        self._preparer = Preparer(
            renderer=parts.renderer,
            tokenizer=parts.tokenizer,
            facts=ModelFacts(
                vocab_size=core.info.vocab_size,
                eos_ids=core.info.eos_ids,
                max_model_len=core.info.max_model_len,
                max_prompts=limits.max_prompts,
                defaults=parts.defaults,
            ),
            model_names=(parts.name,),
            max_json_depth=limits.max_json_depth,
        )
        self._core, self._name = core, parts.name
        await core.start()
        return self

    async def aclose(self) -> None:
        """End what is open (its readers get RequestAborted) and free the device. Idempotent.

        A cancellation is raised once all is closed.
        """
        if self._core is not None:
            await _to_its_end(asyncio.ensure_future(self._core.aclose()))

    # --- use

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
        **fields: Any,
    ) -> "Generation":
        """Continue ``prompt``: iterate what this returns. Nothing is queued before the iteration begins.

        A string is continued as it is; messages go through the model's chat template. ``max_tokens`` is by default
        what fits the context, the other fields are the model's own recommendation. fields: any other field of
        POST /v1/chat/completions (for messages) or /v1/completions, such as n, top_k, min_p, stop_token_ids,
        logprobs, ignore_eos, priority, timeout.

        The iteration raises InvalidRequest and its children, Overloaded, EngineDead; and, after the deltas so far,
        GenerationFailed, DeadlineExceeded (``timeout``) or RequestAborted (the engine was closed).
        """
        named = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "stop": stop, "seed": seed}
        if wire_only := fields.keys() & _WIRE_ONLY:
            raise InvalidRequest(f"The field {min(wire_only)!r} is the server's alone.", param=min(wire_only))
        if max_tokens is not None and max_tokens < 1:
            raise InvalidRequest("'max_tokens' must be at least 1.", param="max_tokens")
        return Generation(self, prompt, named | fields)

    @property
    def name(self) -> str:
        """The model's own name, "" before the start."""
        return self._name

    @property
    def info(self) -> RunnerInfo:
        """What was decided at start: context, pool, device."""
        return self._running.info

    @property
    def tokenizer(self) -> Tokenizer:
        return self._running.tokenizer

    def statistics(self) -> EngineStatistics:
        return self._running.statistics()

    def health(self) -> Health:
        return self._running.health()

    def flush_prefix_cache(self) -> int:
        """Forget every cached prefix; the number of blocks let go."""
        return self._running.flush_prefix_cache()

    # --- inside

    @property
    def _running(self) -> CoreEngine:
        if self._core is None:
            raise RuntimeError("the Engine has not been started: use `async with`, or `await` it")
        return self._core

    async def _open(self, prompt: Prompt, fields: Mapping[str, Any]) -> TokenStream:
        core, preparer = self._running, self._preparer
        assert preparer is not None
        is_chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        try:
            body = orjson.dumps(
                {**fields, "messages" if is_chat else "prompt": prompt}, option=orjson.OPT_SERIALIZE_NUMPY
            )
        except TypeError as error:
            raise InvalidRequest(f"The prompt or a field cannot be sent to a model: {error}.") from error
        prepare: Callable[[bytes], Prepared[Any]] = preparer.chat if is_chat else preparer.completion
        is_small = len(body) <= self._config.limits.offload_bytes
        prepared = prepare(body) if is_small else await asyncio.to_thread(prepare, body)
        if prepared.unknown:
            raise InvalidRequest(f"There is no field {prepared.unknown[0]!r}.", param=prepared.unknown[0])
        request_id = f"gen-{secrets.token_hex(16)}"
        return core.submit_nowait(
            prepared.request(request_id, core.fit, prompt_param="prompt", deadline_s=prepared.fields.timeout)
        )


class Generation:
    """One call. An async iterator of ``Delta`` with one reader; leaving the loop early aborts the call.

    ``async with`` or ``aclose`` abort it at a known place; otherwise it is when Python lets go of the iterator.
    """

    def __init__(self, engine: Engine, prompt: Prompt, fields: Mapping[str, Any]) -> None:
        self._opened: list[TokenStream] = []
        # The generator must not know this object: a cycle would leave an abandoned call to the garbage collector.
        self._deltas = _deltas(engine, prompt, fields, self._opened)

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        return await anext(self._deltas)

    async def __aenter__(self) -> "Generation":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Abort whatever still runs. Idempotent."""
        await self._deltas.aclose()

    async def text(self) -> str:
        """All of the text that is still to come, of the first choice."""
        return "".join([delta.text async for delta in self if delta.index == 0])

    @property
    def usage(self) -> Usage:
        """Token counts, right once the iteration has ended."""
        return self._opened[0].usage if self._opened else Usage()


async def _deltas(
    engine: Engine, prompt: Prompt, fields: Mapping[str, Any], opened: list[TokenStream]
) -> AsyncGenerator[Delta]:
    stream = await engine._open(prompt, fields)
    opened.append(stream)
    try:
        while deltas := await stream.next():
            for delta in deltas:
                yield delta
                if delta.finish in _FAULTS:
                    fault = _FAULTS[delta.finish] if engine.health().alive else EngineDead
                    raise fault(delta.error or "The request has ended without a reason.")
    finally:
        stream.close()


_FAULTS: Final[Mapping[FinishReason | None, type[AserveError]]] = {
    FinishReason.ERROR: GenerationFailed,
    FinishReason.TIMEOUT: DeadlineExceeded,
    FinishReason.ABORT: RequestAborted,
}
"""Ends that are raised; the others are the delta's ``finish`` alone."""


def _checked(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords by their options' full names. Raises ConfigError for what only a server has."""
    checked = {}
    for keyword, value in keywords.items():
        option = find_keyword(keyword)
        if option.section not in SECTIONS:
            raise ConfigError(f"{option.name} has no effect on an embedded engine.")
        checked[option.name] = value
    return checked


async def _to_its_end(task: asyncio.Future[T]) -> T:
    """Await what must not be left half done: a cancellation meanwhile is raised after it."""
    cancellation: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is not None:
        if not task.cancelled():
            task.exception()  # looked at, or the loop would report it as forgotten
        raise cancellation
    return task.result()
