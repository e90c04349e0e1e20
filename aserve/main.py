"""The composition root: makes every part from the configuration, joins them, and runs them until a signal.

The one module that may import every layer. ``serve`` reads as the life of the process: log, model, engine, server, then
the wait for a signal or a fault, then the way down.
"""

import asyncio
import os
import resource
import signal
import sys
import threading
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict
from typing import Any, Final

import uvloop

from aserve import __version__
from aserve.config import Config
from aserve.core.request import SamplingParams
from aserve.device.alarm import Alarm
from aserve.device.alarm import is_supported as alarm_is_supported
from aserve.device.nvtx import open_ranges
from aserve.device.threads import prepare_process
from aserve.engine.engine import Engine
from aserve.engine.observe import MetricsObserver
from aserve.engine.ports import Observer, Runner, RunnerInfo
from aserve.engine.ranges import RangedRunner, Ranges, mark_scheduler
from aserve.engine.trace import Trace
from aserve.errors import InvalidRequest
from aserve.model.hub import ModelSource, resolve_model
from aserve.obs.drain import Log, open_log
from aserve.obs.loop_watch import GcWatch, LoopWatch, freeze_heap
from aserve.obs.metrics import Metrics
from aserve.server.app import Server, check_address
from aserve.text.chat_template import ChatTemplate, PromptRenderer
from aserve.text.tokenizer import HFTokenizer

DEVICE_LOST_EXIT: Final = 1
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
WAY_DOWN_S: Final = 4.0
"""How long the way down may take, the drain left out: what a device that hangs would hold up for ever."""
FORCED_WAY_DOWN_S: Final = 1.0
"""The same after a second signal: a step that runs may still end, and no more."""


def serve(config: Config) -> int:
    """Serve until SIGTERM or SIGINT; returns the process's exit status.

    0 after a drain, 1 if the engine died. Raises ConfigError or ModelError, one sentence each, before it is ready. Once
    the end has begun and something hangs in it, the process is ended without a return.
    """
    prepare_process()  # before torch is loaded, which reads the environment once
    raise_file_limit()
    log = open_log(config.log)
    last_resort = _LastResort(log)
    try:
        check_address(config.server)  # a model may load for minutes
        source = resolve_model(
            config.model.model,
            cache_dir=config.model.cache_dir,
            load_format="dummy" if config.model.load_format == "dummy" else "auto",
        )
        tokenizer = HFTokenizer.from_folder(source.folder)
        renderer = PromptRenderer(tokenizer, ChatTemplate.from_folder(source.folder))
        warm_up_text(renderer)
        log.adopt_libraries()  # what the renderer has loaded, so that loading the model prints nothing
        runner, defaults = load_model(config, source)
        log.adopt_libraries()  # what the model has loaded
        _log_model(log, config, source, runner.info)
        status = uvloop.run(_serve(config, source, tokenizer, renderer, runner, defaults, log, last_resort))
        for number in STOP_SIGNALS:  # or a late second one, with the loop's handlers gone, would change the status
            signal.signal(number, signal.SIG_IGN)
        return status
    finally:
        last_resort.disarm()
        log.close()


def load_model(config: Config, source: ModelSource) -> tuple[Runner, SamplingParams]:
    """The runner and the model's own sampling defaults. Blocks for seconds; loads torch."""
    from aserve.model.runner import load_runner, sampling_defaults

    runner = load_runner(config.model, config.scheduler, source.folder)
    return runner, sampling_defaults(config.model, source.folder)


def raise_file_limit() -> None:
    """Take all the open files that this user may have: a connection is one, and many systems give 1,024 unasked."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS says "unlimited" and then allows less
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def warm_up_text(renderer: PromptRenderer) -> None:
    """Render and tokenise once, so that no request does it first: the renderer takes most of a second to load."""
    with suppress(InvalidRequest):  # no template, or one that wants other messages
        renderer.encode_chat([{"role": "user", "content": "Hello."}])
    renderer.encode_prompt("Hello.")


def _log_model(log: Log, config: Config, source: ModelSource, info: RunnerInfo) -> None:
    """What was decided at start, and a warning where the context is shorter than one would expect."""
    from aserve.model.config import ModelConfig

    num_pool_tokens = info.num_blocks * info.block_size
    log.logger.info(
        "model.loaded",
        model=source.name,
        origin=source.origin,
        device=info.device,
        max_model_len=info.max_model_len,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        kv_cache_mib=round(num_pool_tokens * info.kv_bytes_per_token / 2**20),
        weights_mib=round(info.weight_bytes / 2**20),
    )
    wanted = config.scheduler.max_model_len or ModelConfig.from_folder(source.folder).max_position_embeddings
    if info.max_model_len < wanted:
        log.logger.warning(
            "model.max_model_len_lowered",
            wanted=wanted,
            max_model_len=info.max_model_len,
            reason="the KV pool holds no more" if info.max_model_len == num_pool_tokens else "the model's own is less",
        )


async def _serve(
    config: Config,
    source: ModelSource,
    tokenizer: HFTokenizer,
    renderer: PromptRenderer,
    runner: Runner,
    defaults: SamplingParams,
    log: Log,
    last_resort: "_LastResort",
) -> int:
    model_names = config.model.served_model_name or (source.name,)
    metrics = _make_metrics(config, model_names[0], runner.info)
    ranges = _open_ranges(log) if config.trace.nvtx else None
    if ranges is not None:
        runner = RangedRunner(runner, ranges)
    observer = MetricsObserver(metrics)
    trace = _make_trace(config, source, runner.info, observer)
    engine = Engine(
        runner,
        tokenizer,
        config.scheduler,
        config.engine,
        observer=trace or observer,
        log=log.logger.bind(part="engine"),
        make_alarm=Alarm if alarm_is_supported() else None,
    )
    if ranges is not None:
        mark_scheduler(engine.scheduler, ranges)
    watch = LoopWatch(
        metrics.loop_lag,
        interval_s=config.metrics.loop_lag_interval_ms / 1000,
        is_idle=lambda: engine.is_idle,
    )
    gc_watch = GcWatch(metrics.gc_pause)

    def more_statistics() -> dict[str, Any]:
        return {"loop": asdict(watch.statistics()), "gc": {"pause_max_ms": round(gc_watch.max_s * 1000, 3)}}

    server = Server(
        engine=engine,
        renderer=renderer,
        model_names=model_names,
        options=config.server,
        limits=config.limits,
        log=log.logger.bind(part="server"),
        metrics=metrics,
        trace=trace,
        sampling_defaults=defaults,
        more_statistics=more_statistics,
    )
    metrics.before_render(lambda: _gather(metrics, server, log))
    async with AsyncExitStack() as stack:
        signals = _Signals()
        stack.push_async_callback(engine.aclose)
        await engine.start()
        stack.push_async_callback(server.aclose)
        host, port = await server.start()
        if config.metrics.loop_lag_interval_ms:
            watch.start()
            stack.push_async_callback(watch.aclose)
        freeze_heap()
        gc_watch.install()  # behind the collection just done, which nobody waits for
        stack.callback(gc_watch.remove)
        _announce(host, port, source.name, runner.info.device)
        return await _until_stopped(engine, server, signals, log, last_resort)


def _make_metrics(config: Config, model_name: str, info: RunnerInfo) -> Metrics:
    return Metrics(
        model_name,
        max_model_len=info.max_model_len,
        cache_config={
            "block_size": info.block_size,
            "num_gpu_blocks": info.num_blocks,
            "kv_cache_size_tokens": info.num_blocks * info.block_size,
            "enable_prefix_caching": config.scheduler.enable_prefix_caching,
            "gpu_memory_utilization": config.model.gpu_memory_utilization,
        },
        vllm_names=config.metrics.vllm_names,
        process=config.metrics.process,
    )


def _gather(metrics: Metrics, server: Server, log: Log) -> None:
    """Bring up to date what the log and the server count for themselves."""
    metrics.log_lines_dropped.value = log.statistics().num_dropped
    figures = server.statistics()
    connections = figures["connections"]
    metrics.open_connections.value = connections["open"]
    metrics.open_websockets.value = figures["websockets"]
    metrics.connections_refused.value = connections["refused"]
    metrics.slow_headers.value = connections["slow_headers"]
    metrics.write_stalls.value = connections["write_stalls"]


def _make_trace(config: Config, source: ModelSource, info: RunnerInfo, metrics: Observer) -> Trace | None:
    """The observer that keeps the last steps and tells the metrics of everything; None where no trace is wanted."""
    if not config.trace.num_steps:
        return None
    return Trace(
        config.trace.num_steps,
        then=metrics,
        name=f"aserve, {source.name}",
        about={
            "version": __version__,
            "model": source.name,
            "device": info.device,
            "policy": config.scheduler.policy,
            "max_inflight": config.scheduler.max_inflight,
        },
    )


def _open_ranges(log: Log) -> Ranges | None:
    """Where NVTX ranges go; None, and a warning, where there is no CUDA."""
    ranges = open_ranges()
    if ranges is None:
        log.logger.warning("trace.nvtx_ignored", reason="there is no CUDA device, and NVTX ranges come with CUDA")
    return ranges


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
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def _until_stopped(
    engine: Engine, server: Server, signals: _Signals, log: Log, last_resort: "_LastResort"
) -> int:
    async with _Race() as race:
        death, second = race.add(engine.wait_dead()), race.add(signals.second.wait())
        await race.first_of(death, race.add(signals.first.wait()))
        if not death.done():
            log.logger.info("server.stopping")
            await race.first_of(death, second, race.add(server.drain_and_stop()))
        is_dead, is_forced = death.done(), second.done()
    if not is_dead:
        last_resort.arm(0, within_s=FORCED_WAY_DOWN_S if is_forced else WAY_DOWN_S)
        return 0
    last_resort.arm(DEVICE_LOST_EXIT, within_s=WAY_DOWN_S)
    log.logger.error("server.failed", reason=str(death.result()))
    await server.drain_and_stop()  # the engine has ended every stream: their last events still have to leave
    return DEVICE_LOST_EXIT


class _LastResort:
    """Ends the process from a thread of its own where the way down hangs: the loop may be what does not go on."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._timer: threading.Timer | None = None

    def arm(self, status: int, *, within_s: float) -> None:
        """Exit with ``status`` after ``within_s``, unless ``disarm`` comes first."""
        self._timer = threading.Timer(within_s, self._leave, (status,))
        self._timer.daemon = True
        self._timer.start()

    def disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _leave(self, status: int) -> None:
        self._log.logger.error("server.end_hangs")
        self._log.close()
        os._exit(status)


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
