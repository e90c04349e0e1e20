"""The composition root: makes every part from the configuration, joins them, and runs them until a signal.

The one module that may import every layer. ``serve`` reads as the life of the process: log, model, engine, server, then
the wait for a signal or a fault, then the way down.
"""

import asyncio
import signal
import sys
from contextlib import AsyncExitStack

import uvloop

from aserve.config import Config
from aserve.core.request import SamplingParams
from aserve.device.threads import prepare_process
from aserve.engine.engine import Engine
from aserve.engine.observe import MetricsObserver
from aserve.engine.ports import Runner
from aserve.model.hub import ModelSource, resolve_model
from aserve.obs.drain import Log, open_log
from aserve.obs.loop_watch import GcWatch, LoopWatch, freeze_heap
from aserve.obs.metrics import Metrics
from aserve.server.app import Server
from aserve.text.chat_template import ChatTemplate, PromptRenderer
from aserve.text.tokenizer import HFTokenizer

DEVICE_LOST_EXIT = 1


def serve(config: Config) -> int:
    """Serve until SIGTERM or SIGINT; returns the process's exit status.

    0 after a drain, 1 if the engine died. Raises ConfigError or ModelError, one sentence each, before it is ready.
    """
    prepare_process()  # before torch is loaded, which reads the environment once
    log = open_log(config.log)
    try:
        source = resolve_model(config.model.model, cache_dir=config.model.cache_dir)
        tokenizer = HFTokenizer.from_folder(source.folder)
        renderer = PromptRenderer(tokenizer, ChatTemplate.from_folder(source.folder))
        runner, defaults = load_model(config, source)
        log.adopt_libraries()
        log.logger.info("model.loaded", model=source.name, origin=source.origin, device=runner.info.device)
        return uvloop.run(_serve(config, source, tokenizer, renderer, runner, defaults, log))
    finally:
        log.close()


def load_model(config: Config, source: ModelSource) -> tuple[Runner, SamplingParams]:
    """The runner and the model's own sampling defaults. Blocks for seconds; loads torch."""
    from aserve.model.runner import load_runner, sampling_defaults

    runner = load_runner(config.model, config.scheduler, source.folder)
    return runner, sampling_defaults(config.model, source.folder)


async def _serve(
    config: Config,
    source: ModelSource,
    tokenizer: HFTokenizer,
    renderer: PromptRenderer,
    runner: Runner,
    defaults: SamplingParams,
    log: Log,
) -> int:
    metrics = Metrics(source.name, vllm_names=config.metrics.vllm_names, process=config.metrics.process)
    engine = Engine(
        runner,
        tokenizer,
        config.scheduler,
        config.engine,
        observer=MetricsObserver(metrics),
        log=log.logger.bind(part="engine"),
    )
    server = Server(
        engine=engine,
        renderer=renderer,
        model_names=config.model.served_model_name or (source.name,),
        options=config.server,
        limits=config.limits,
        log=log.logger.bind(part="server"),
        metrics=metrics,
        sampling_defaults=defaults,
    )
    watch = LoopWatch(metrics.loop_lag, interval_s=config.metrics.loop_lag_interval_ms / 1000)
    gc_watch = GcWatch(metrics.gc_pause)
    metrics.before_render(lambda: setattr(metrics.log_lines_dropped, "value", log.statistics().num_dropped))
    async with AsyncExitStack() as stack:
        signals = _Signals()
        stack.push_async_callback(engine.aclose)
        await engine.start()
        stack.push_async_callback(server.aclose)
        host, port = await server.start()
        if config.metrics.loop_lag_interval_ms:
            watch.start()
            stack.push_async_callback(watch.aclose)
        gc_watch.install()
        stack.callback(gc_watch.remove)
        freeze_heap()
        _announce(host, port, source.name, runner.info.device)
        return await _until_stopped(engine, server, signals, log)


def _announce(host: str, port: int, model: str, device: str) -> None:
    """One line for people and scripts that wait for it; the log has its own."""
    address = f"[{host}]" if ":" in host else host
    sys.stdout.write(f"aserve: {model} on {device} is ready at http://{address}:{port}\n")
    sys.stdout.flush()


class _Signals:
    """SIGTERM and SIGINT, counted: the first asks to drain, the second to stop at once."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def _until_stopped(engine: Engine, server: Server, signals: _Signals, log: Log) -> int:
    async with _Race() as race:
        death = race.add(engine.wait_dead())
        await race.first_of(death, race.add(signals.first.wait()))
        if not death.done():
            log.logger.info("server.stopping")
            drain = race.add(server.drain_and_stop())
            await race.first_of(death, drain, race.add(signals.second.wait()))
        if death.done():
            log.logger.error("server.failed", reason=str(death.result()))
            return DEVICE_LOST_EXIT
        return 0


class _Race:
    """Tasks of which the first to end decides; the others are cancelled on the way out."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[object]] = []

    async def __aenter__(self) -> "_Race":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def add(self, coroutine: object) -> "asyncio.Task[object]":
        task: asyncio.Task[object] = asyncio.create_task(coroutine)  # type: ignore[arg-type]
        self._tasks.append(task)
        return task

    async def first_of(self, *tasks: "asyncio.Task[object]") -> None:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
