"""The whole server over a scripted device, in a process of its own: what the path costs when the model costs nothing.

    python tests/bench/scripted_server.py --port 8123 --step-ms 1

On SIGTERM it prints one line of JSON: CPU seconds, tokens, CPU per token, and where the samples fell, by stage.
"""

import argparse
import asyncio
import json
import resource
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import FrameType

import uvloop

from aserve.core.options import SchedulerOptions
from aserve.device.alarm import Alarm, is_supported
from aserve.engine.engine import Engine
from aserve.engine.observe import MetricsObserver
from aserve.engine.options import EngineOptions
from aserve.obs.log import Logger
from aserve.obs.loop_watch import LoopWatch, freeze_heap
from aserve.obs.metrics import Metrics
from aserve.server.app import Server
from aserve.server.options import LimitOptions, ServerOptions
from aserve.testing import ByteTokenizer, ScriptedRunner
from aserve.text.chat_template import ChatTemplate, PromptRenderer

TEMPLATE = "{% for message in messages %}{{ message.role }}:{{ message.content }}\n{% endfor %}assistant:"

STAGES = {
    "aserve/testing/": "device (scripted)",
    "aserve/core/": "scheduler",
    "aserve/engine/lander.py": "landing",
    "aserve/engine/loop.py": "launching",
    "aserve/engine/deliver.py": "delivery",
    "aserve/engine/stream.py": "mailbox",
    "aserve/engine/engine.py": "landing",
    "aserve/text/": "text",
    "aserve/obs/": "metrics and log",
    "aserve/server/sse.py": "framing",
    "aserve/server/stream_sse.py": "socket",
    "aserve/server/": "requests",
    "aiohttp": "requests",
    "asyncio": "event loop",
}


class Sampler:
    """Where the process's CPU time goes, one sample a millisecond of it: the innermost frame that a stage claims.

    stages: by a part of the file's path, the first that fits.
    """

    def __init__(self, stages: Mapping[str, str] = STAGES) -> None:
        self.counts: Counter[str] = Counter()
        self._stages = stages

    def start(self) -> None:
        signal.signal(signal.SIGPROF, self._on_sample)
        signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)

    def _on_sample(self, _number: int, frame: FrameType | None) -> None:
        while frame is not None:
            name = frame.f_code.co_filename
            for part, stage in self._stages.items():
                if part in name:
                    self.counts[stage] += 1
                    return
            frame = frame.f_back
        self.counts["event loop"] += 1


async def serve(arguments: argparse.Namespace) -> dict[str, object]:
    def step_time_s(plan: object) -> float:
        return arguments.step_ms / 1000

    runner = ScriptedRunner(
        b"The quick brown fox jumps over the lazy dog. ",
        max_num_seqs=arguments.max_num_seqs,
        num_blocks=1 << 16,
        block_size=32,
        max_model_len=8192,
        step_time_s=step_time_s,
        log_steps=1,
    )
    metrics = Metrics("scripted")
    watch = LoopWatch(metrics.loop_lag, interval_s=0.005)
    options = SchedulerOptions(
        max_num_seqs=arguments.max_num_seqs, max_num_batched_tokens=8192, policy=arguments.policy
    )
    engine = Engine(
        runner,
        ByteTokenizer(),
        options,
        EngineOptions(max_queue_requests=1 << 16, max_joined_steps=arguments.max_joined_steps),
        observer=MetricsObserver(metrics),
        make_alarm=Alarm if is_supported() else None,
    )
    renderer = PromptRenderer(ByteTokenizer(), ChatTemplate({"default": TEMPLATE}, special_tokens={}))
    renderer.encode_chat([{"role": "user", "content": "warm up"}], add_generation_prompt=True)
    server = Server(
        engine=engine,
        renderer=renderer,
        model_names=("scripted",),
        options=ServerOptions(port=arguments.port),
        limits=LimitOptions(idle_timeout_s=3600.0),
        log=Logger.silent(),
        metrics=metrics,
        more_statistics=lambda: {"loop": asdict(watch.statistics())},
    )
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await engine.start()
    _, port = await server.start()
    if arguments.send_buffer:
        assert server._listener is not None
        for listener in server._listener.sockets:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, arguments.send_buffer)
    watch.start()
    freeze_heap()
    sampler = Sampler()
    sys.stdout.write(f"ready at http://127.0.0.1:{port}\n")
    sys.stdout.flush()
    if not arguments.no_sampler:
        sampler.start()
    start_s, start_cpu_s, start_kernel_s = time.perf_counter(), time.process_time(), _kernel_s()
    await stopped.wait()
    sampler.stop()
    cpu_s, wall_s = time.process_time() - start_cpu_s, time.perf_counter() - start_s
    kernel_s = _kernel_s() - start_kernel_s
    await watch.aclose()
    statistics, lag = engine.statistics(), watch.statistics()
    await server.aclose()
    await engine.aclose()
    num_tokens = statistics.generation_tokens
    total = sum(sampler.counts.values()) or 1
    shares = {stage: count / total for stage, count in sampler.counts.most_common()}
    us_per_token = cpu_s / max(num_tokens, 1) * 1e6
    return {
        "num_tokens": num_tokens,
        "num_steps": statistics.num_steps,
        "wall_s": round(wall_s, 3),
        "cpu_s": round(cpu_s, 3),
        "us_per_token": round(us_per_token, 2),
        "us_per_token_in_kernel": round(kernel_s / max(num_tokens, 1) * 1e6, 2),
        "us_per_token_by_stage": {stage: round(share * us_per_token, 2) for stage, share in shares.items()},
        "loop_lag_ms": {"p50": round(lag.p50_ms, 2), "p99": round(lag.p99_ms, 2), "max": round(lag.max_ms, 2)},
    }


def _kernel_s() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--step-ms", type=float, default=1.0)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--policy", default="overlap")
    parser.add_argument("--max-joined-steps", type=int, default=EngineOptions().max_joined_steps)
    parser.add_argument("--send-buffer", type=int, default=0, help="bytes that the kernel keeps for a slow reader")
    parser.add_argument("--no-sampler", action="store_true", help="leave the stages out, and their cost")
    report = uvloop.run(serve(parser.parse_args()))
    sys.stdout.write(json.dumps(report) + "\n")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    sys.exit(main())
