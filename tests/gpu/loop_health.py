"""The event loop under load on the GPU: lag, CPU a token by stage, launch times, and how idle the GPU is.

    python tests/gpu/loop_health.py [--shape llama1b] [--streams 1 16 64 256] [--policies sync overlap late]
    python tests/gpu/loop_health.py --shape llama8b --streams 1 16 64 --policies overlap --tokens 192
    python tests/gpu/loop_health.py --streams 64 256 --policies overlap --words 128 --tokens 256 --rounds 4 \\
        --max-num-batched-tokens 1024 4096 --timelines FOLDER
    python tests/gpu/loop_health.py --device cpu --shape tiny --streams 1 8 --tokens 32 --max-num-seqs 8

The whole server in this process, driven over SSE by ``loadgen`` in others; one model is loaded once and served under
each policy and token budget in turn. Each point is measured in one run, and once more for half a second under the
profiler, which tells when no kernel ran, and what the loop was at then; --timelines keeps that time's last tenth
of a second, host and device on one clock, for Perfetto. CPU is this process's alone; stages by samples of its CPU time.
A launch is a step's time in ``Runner.launch``, which holds the loop; those of rows alone, without prompts, are told
apart.
"""

import argparse
import asyncio
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import uvloop
from kept_runner import KeptRunner
from make_models import SHAPES, write_model
from timeline import host_slices, idle_by_host, idle_gaps, kernels_of, write

from aserve.core.options import SchedulerOptions
from aserve.core.plan import BatchPlan
from aserve.core.policy import POLICIES
from aserve.device.alarm import Alarm
from aserve.device.alarm import is_supported as alarm_is_supported
from aserve.device.threads import prepare_process
from aserve.engine.engine import Engine
from aserve.engine.observe import MetricsObserver
from aserve.engine.options import EngineOptions
from aserve.engine.ports import Flight, Runner
from aserve.engine.trace import Cut, Trace
from aserve.model.options import ModelOptions
from aserve.obs.log import Logger
from aserve.obs.loop_watch import LoopWatch, freeze_heap
from aserve.obs.metrics import Metrics
from aserve.obs.trace import Slice
from aserve.server.app import Server
from aserve.server.options import LimitOptions, ServerOptions
from aserve.text.chat_template import ChatTemplate, PromptRenderer
from aserve.text.tokenizer import HFTokenizer

ROOT: Final = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "bench"))

from scripted_server import STAGES, Sampler  # noqa: E402  # lies in another folder

DEVICE_STAGES: Final = {
    "aserve/device/": "waiting for the device",
    "aserve/model/": "device",
    "torch": "device",
    "triton": "device",
}
MANY_STREAMS: Final = 64
PROMPT_TOKENS: Final = (512, 1024, 2048, 4096)
"""Sizes that steps with prompts are sorted by."""
PROFILE_S: Final = 0.5
LAUNCH_MS_AIM: Final = 0.5
"""At p99."""


class TimedRunner(KeptRunner):
    """Notes how long each launch held the loop, and of which steps: with prompts or of rows alone. On a GPU a launch in
    parts, with turns of the loop between them, counts as so many."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self.launches_s: list[tuple[float, bool]] = []
        self._notes_goes = hasattr(runner, "_note_go")  # a CudaRunner, whose module would load torch before its time
        if self._notes_goes:
            runner._note_go = self._note  # type: ignore[attr-defined]

    def _note(self, seconds: float, plan: BatchPlan) -> None:
        self.launches_s.append((seconds, bool(plan.chunks)))

    def launch(self, plan: BatchPlan) -> Flight:
        started_s = time.perf_counter()
        flight = super().launch(plan)
        if not self._notes_goes:
            self._note(time.perf_counter() - started_s, plan)
        return flight


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Of one policy, budget and number of joined steps at so many streams. ttft, tpot, gaps: the client's.

    cpu_us: of this process a token, and by stage (what other threads take counts as what the loop is at). loop_busy:
    share of the time that the loop's thread ran, looking for landings included. rows_*: of steps without prompts.
    bubble: share of the time in which no step was out beside work, as the host saw it. steps: by what they hold, how
    many, ms at the median and seconds in all, as the host saw them. gpu_idle: shares of the time in which no kernel
    ran, by what the loop was at.
    """

    policy: str
    budget: int
    joined: int
    streams: int
    tokens_per_s: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    tpot_ms_p50: float
    gap_ms_p50: float
    gap_ms_p99: float
    rows_a_step: float
    lag_ms_p50: float
    lag_ms_p99: float
    launch_ms_p50: float
    launch_ms_p99: float
    launch_ms_max: float
    rows_launch_ms_p99: float
    cpu_us: float
    cpu_us_by_stage: dict[str, float]
    loop_busy: float
    looks_a_step: float
    bubble: float
    steps: dict[str, tuple[int, float, float]]
    gpu_idle: dict[str, float] | None


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Chats of that many streams, ``rounds`` for each. tokens: out, of each. words: in, some four tokens each."""

    streams: int
    tokens: int
    words: int
    rounds: int


async def load(url: str, load: Load, *, seed: int) -> dict[str, Any]:
    """Returns what loadgen found."""
    streams = load.streams
    return await run_loadgen(
        url, "--concurrency", str(streams), "--num-requests", str(max(streams * load.rounds, 4)),
        "--max-tokens", str(load.tokens), "--words", str(load.words), "--seed", str(seed),
        "--processes", "4" if streams >= MANY_STREAMS else "1",
    )  # fmt: skip


async def run_loadgen(url: str, *flags: str) -> dict[str, Any]:
    """``loadgen run`` in a process of its own, which ignores ends of sequences and ends with the call.

    Returns what it found.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "loadgen.json"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "loadgen", "run", "--quiet", "--base-url", url, "--ignore-eos", *flags,
            "--json", str(result),
            cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = await process.wait()
        finally:
            if process.returncode is None:  # cancelled
                os.killpg(process.pid, signal.SIGTERM)  # with the processes that it has started
                await process.wait()
        if code:
            raise SystemExit("requests failed: see above")
        found: dict[str, Any] = json.loads(result.read_text())
        return found


@asynccontextmanager
async def serving(
    runner: KeptRunner,
    options: SchedulerOptions,
    renderer: PromptRenderer,
    tokenizer: HFTokenizer,
    **engine_options: Any,
) -> AsyncIterator[tuple[Engine, str, Metrics, Trace]]:
    """The whole server on a port of its own, put together as ``aserve.main`` does it."""
    metrics = Metrics("measured")
    trace = Trace(1 << 14, then=MetricsObserver(metrics))
    engine = Engine(
        runner,
        tokenizer,
        options,
        EngineOptions(max_queue_requests=1 << 14, **engine_options),
        observer=trace,
        make_alarm=Alarm if alarm_is_supported() else None,
    )
    server = Server(
        engine=engine,
        renderer=renderer,
        model_names=("measured",),
        options=ServerOptions(port=0),
        limits=LimitOptions(),
        log=Logger.silent(),
        metrics=metrics,
    )
    await engine.start()
    host, port = await server.start()
    try:
        yield engine, f"http://{host}:{port}", metrics, trace
    finally:
        await server.aclose()
        await engine.aclose()


async def measure(
    engine: Engine,
    runner: TimedRunner,
    url: str,
    metrics: Metrics,
    trace: Trace,
    policy: str,
    asked: Load,
    timeline: Path | None,
    *,
    with_profile: bool,
) -> Point:
    await load(url, replace(asked, tokens=min(asked.tokens, 32), rounds=1), seed=1)
    watch = LoopWatch(metrics.loop_lag, interval_s=0.005)
    sampler = Sampler(DEVICE_STAGES | STAGES)
    before = engine.statistics()
    runner.launches_s.clear()
    watch.start()
    sampler.start()
    started_cpu_s, started_loop_s = time.process_time(), time.thread_time()
    started_s = time.monotonic()
    summary = (await load(url, asked, seed=2))["summary"]
    loop_busy = (time.thread_time() - started_loop_s) / (time.monotonic() - started_s)
    cut = trace.cut(time.monotonic() - started_s)
    cpu_s = time.process_time() - started_cpu_s
    sampler.stop()
    await watch.aclose()
    launches, after, lag = list(runner.launches_s), engine.statistics(), watch.statistics()
    launches_s = [took_s for took_s, _ in launches]
    num_tokens = max(1, after.generation_tokens - before.generation_tokens)
    num_steps = max(1, after.num_steps - before.num_steps)
    looks = after.runner.get("event_looks", 0) - before.runner.get("event_looks", 0)
    num_samples = sum(sampler.counts.values()) or 1
    cpu_us = cpu_s / num_tokens * 1e6
    return Point(
        policy=policy,
        budget=engine.scheduler.options.max_num_batched_tokens,
        joined=engine.options.max_joined_steps,
        streams=asked.streams,
        tokens_per_s=summary["throughput"]["output_tokens_per_s"],
        ttft_ms_p50=summary["first_content_ms"]["sent"]["p50"],
        ttft_ms_p99=summary["first_content_ms"]["sent"]["p99"],
        tpot_ms_p50=summary["tpot_ms"]["p50"],
        gap_ms_p50=summary["inter_chunk_ms"]["p50"],
        gap_ms_p99=summary["inter_chunk_ms"]["p99"],
        rows_a_step=(after.num_rows - before.num_rows) / num_steps,
        lag_ms_p50=lag.p50_ms,
        lag_ms_p99=lag.p99_ms,
        launch_ms_p50=quantile(launches_s, 0.5) * 1e3,
        launch_ms_p99=quantile(launches_s, 0.99) * 1e3,
        launch_ms_max=max(launches_s, default=0.0) * 1e3,
        rows_launch_ms_p99=quantile([took_s for took_s, has_prompts in launches if not has_prompts], 0.99) * 1e3,
        cpu_us=cpu_us,
        cpu_us_by_stage={stage: count / num_samples * cpu_us for stage, count in sampler.counts.most_common()},
        loop_busy=loop_busy,
        looks_a_step=looks / num_steps,
        bubble=(after.bubble_s - before.bubble_s) / max(steps_s(cut), 1e-9),
        steps=steps_by_kind(cut),
        gpu_idle=await gpu_idle(engine, url, trace, asked, timeline) if with_profile else None,
    )


def steps_of(cut: Cut) -> list[Slice]:
    """The device's, from the landing before or its launch, whichever is later, to its landing."""
    return [step for step in cut.timeline("").lanes["device"] if step.end_s is not None]


def steps_s(cut: Cut) -> float:
    """From the first step's begin to the last one's end."""
    steps = steps_of(cut)
    return (steps[-1].end_s or 0.0) - steps[0].start_s if steps else 0.0


def steps_by_kind(cut: Cut) -> dict[str, tuple[int, float, float]]:
    times_ms = defaultdict[str, list[float]](list)
    for step in steps_of(cut):
        num_tokens = int(step.args["prefill_tokens"])
        limit = next((limit for limit in PROMPT_TOKENS if num_tokens <= limit), None)
        kind = f"up to {limit} prompt tokens" if limit else "more"
        times_ms[kind if num_tokens else "rows alone"].append(((step.end_s or 0.0) - step.start_s) * 1e3)
    return {kind: (len(all_ms), median(all_ms), sum(all_ms) / 1e3) for kind, all_ms in sorted(times_ms.items())}


def make_profiler() -> Any:
    """Of kernels alone: what notes the host's calls too would slow the host."""
    import torch

    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])


async def gpu_idle(
    engine: Engine, url: str, trace: Trace, asked: Load, timeline: Path | None
) -> dict[str, float] | None:
    """Shares of the time between the first kernel and the last in which none ran, in the middle of a load, by what the
    loop was at. timeline: the file for it."""
    import torch

    if not torch.cuda.is_available():
        return None
    rounds = 4 if asked.streams >= MANY_STREAMS else 8  # some seconds: the profiler takes its time to start
    loading = asyncio.create_task(load(url, replace(asked, rounds=rounds), seed=3))
    while engine.statistics().num_running < asked.streams and not loading.done():  # noqa: ASYNC110  # nobody tells
        await asyncio.sleep(0.02)
    profiler = make_profiler()
    profiler.start()
    await asyncio.sleep(PROFILE_S)
    profiler.stop()
    cut = trace.cut(2 * PROFILE_S + 5)  # stopping a profiler takes its time too
    kernels = kernels_of(profiler)
    loading.cancel()  # at one stream of 8B the rest would take long
    with suppress(asyncio.CancelledError):
        await loading
    while engine.statistics().num_running:  # noqa: ASYNC110  # those that loadgen has left
        await asyncio.sleep(0.02)
    if not kernels:
        return None
    if timeline is not None:
        write(cut, kernels, timeline)
    whole_s = max(kernel.end_s for kernel in kernels) - kernels[0].start_s
    idle_s = idle_by_host(idle_gaps(kernels), host_slices(cut))
    return {what: seconds / whole_s for what, seconds in idle_s.items()}


def table(points: Sequence[Point]) -> str:
    lines = [
        "| policy | budget | joined | streams | tokens/s | TTFT ms p50 | p99 | TPOT ms p50 | gap ms p50 | p99 "
        "| rows a step | loop lag ms p50 | p99 | launch ms p50 | p99 | max | p99 of rows | CPU µs a token "
        "| loop busy | looks a step | bubbles | GPU idle |",
        "|---" * 22 + "|",
    ]
    for point in points:
        idle = "" if point.gpu_idle is None else f"{sum(point.gpu_idle.values()):.1%}"
        lines.append(
            f"| {point.policy} | {point.budget} | {point.joined} | {point.streams} "
            f"| {point.tokens_per_s:.0f} | {point.ttft_ms_p50:.1f} "
            f"| {point.ttft_ms_p99:.1f} | {point.tpot_ms_p50:.2f} | {point.gap_ms_p50:.2f} "
            f"| {point.gap_ms_p99:.2f} | {point.rows_a_step:.1f} | {point.lag_ms_p50:.2f} | {point.lag_ms_p99:.2f} "
            f"| {point.launch_ms_p50:.3f} | {point.launch_ms_p99:.3f} | {point.launch_ms_max:.2f} "
            f"| {point.rows_launch_ms_p99:.3f} | {point.cpu_us:.1f} | {point.loop_busy:.0%} | {point.looks_a_step:.1f} "
            f"| {point.bubble:.1%} | {idle} |"
        )
    for point in points:
        name = f"{point.policy} {point.budget} {point.joined} at {point.streams}"
        steps = ", ".join(f"{kind}: {n} of {ms:.2f} ms, {all_s:.2f} s" for kind, (n, ms, all_s) in point.steps.items())
        lines += ["", f"steps, {name}: {steps}"]
        if point.gpu_idle is not None:
            shares = ", ".join(f"{what} {share:.1%}" for what, share in point.gpu_idle.items())
            lines += [f"no kernel ran, {name}, while the loop was at: {shares}"]
    late = [f"{point.policy} at {point.streams}" for point in points if point.launch_ms_p99 > LAUNCH_MS_AIM]
    lines += ["", f"launch p99 above {LAUNCH_MS_AIM} ms: {', '.join(late) or 'nowhere'}"]
    last = points[-1]
    stages = ", ".join(f"{stage} {us:.1f}" for stage, us in last.cpu_us_by_stage.items())
    lines += ["", f"CPU µs a token by stage, {last.policy} at {last.streams} streams: {stages}"]
    return "\n".join(lines)


async def run(arguments: argparse.Namespace, runner: Runner, model: Path) -> list[Point]:
    tokenizer = HFTokenizer.from_folder(model)
    renderer = PromptRenderer(tokenizer, ChatTemplate.from_folder(model))
    renderer.encode_chat([{"role": "user", "content": "warm up"}])
    timed = TimedRunner(runner)
    if arguments.device == "cuda":  # the first start of a profiler takes seconds
        with make_profiler():
            pass
    freeze_heap()
    points = []
    try:
        for policy, budget, joined in itertools.product(
            arguments.policies, arguments.max_num_batched_tokens, arguments.max_joined_steps
        ):
            options = scheduler_options(arguments, policy, arguments.max_inflight)
            options = replace(options, max_num_batched_tokens=budget or runner.info.max_num_batched_tokens)
            async with serving(timed, options, renderer, tokenizer, max_joined_steps=joined) as (
                engine,
                url,
                metrics,
                trace,
            ):
                for streams in arguments.streams:
                    asked = Load(
                        streams=streams, tokens=arguments.tokens, words=arguments.words, rounds=arguments.rounds
                    )
                    file = arguments.timelines and arguments.timelines / f"{policy}-{budget}-{joined}-{streams}.json"
                    point = await measure(
                        engine, timed, url, metrics, trace, policy, asked, file, with_profile=not arguments.no_profile
                    )
                    points.append(point)
                    print(json.dumps(asdict(point)), file=sys.stderr, flush=True)  # noqa: T201  # if it is cut short
    finally:
        await runner.aclose()
    return points


def scheduler_options(
    arguments: argparse.Namespace, policy: Any, max_inflight: int = SchedulerOptions().max_inflight
) -> SchedulerOptions:
    return SchedulerOptions(
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=max(arguments.max_num_batched_tokens),
        max_model_len=4096,
        policy=policy,
        max_inflight=max_inflight,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--device-wait", choices=("auto", "timer", "thread", "poll"), default="auto")
    parser.add_argument("--shape", choices=list(SHAPES), default="llama1b")
    parser.add_argument("--streams", type=int, nargs="+", default=(1, 16, 64, 256))
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=("sync", "overlap", "late"))
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--words", type=int, default=32, help="of a prompt, some four tokens each")
    parser.add_argument("--rounds", type=int, default=2, help="requests a stream")
    parser.add_argument("--max-inflight", type=int, default=SchedulerOptions().max_inflight)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, nargs="+", default=(0,), help="0 is the server's own")
    parser.add_argument("--max-joined-steps", type=int, nargs="+", default=(EngineOptions().max_joined_steps,))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--timelines", type=Path, help="a folder for files of host and device at each point")
    arguments = parser.parse_args()
    if arguments.timelines is not None:
        arguments.timelines.mkdir(parents=True, exist_ok=True)
    prepare_process()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), arguments.shape)
        from aserve.model.runner import load_runner

        options = ModelOptions(load_format="dummy", device=arguments.device, device_wait=arguments.device_wait)
        runner = load_runner(options, scheduler_options(arguments, "overlap"), model)
        points = uvloop.run(run(arguments, runner, model))
    print(table(points))  # noqa: T201
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(point) for point in points], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
