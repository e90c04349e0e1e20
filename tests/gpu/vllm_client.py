"""vLLM's load generator as processes that last, for ``compare_vllm.py``: one import of vLLM, many runs.

    vllm_client.py FD [FD ...]

Imports vLLM and becomes one process a descriptor, which is a socket, and says "ready" on each. Then, run by run: a line
of ``vllm bench serve`` arguments as JSON comes in; "prepared" goes out when the prompts are made; on "go" the requests
are sent, so that several clients begin together; one line of JSON goes out: the requests' figures in seconds, by the
host's monotonic clock, and the share of a core that the client took. Anything but "go" calls the run off.
"""

import json
import os
import socket
import sys
import time
from io import TextIOWrapper
from typing import Any


def figures(result: dict[str, Any], cpu: float) -> dict[str, Any]:
    """What counts of a detailed result. A request's gaps are between the events in which its tokens came."""
    gaps = result["itls"]
    requests = list(zip(result["start_times"], result["ttfts"], gaps, result["output_lens"], strict=True))
    return {
        "completed": result["completed"],
        "failed": result["failed"],
        "errors": sorted({error for error in result["errors"] if error}),
        "output_tokens": result["total_output_tokens"],
        "input_tokens": result["total_input_tokens"],
        "started_s": min((start for start, *_ in requests), default=0.0),
        "ended_s": max((start + first + sum(rest) for start, first, rest, _ in requests), default=0.0),
        "ttft_s": result["ttfts"],
        "tpot_s": [sum(rest) / (tokens - 1) for _, _, rest, tokens in requests if tokens > 1],
        "itl_s": [round(gap, 6) for rest in gaps for gap in rest],
        "cpu": cpu,
    }


def serve_runs(serve: Any, parser: Any, lines: TextIOWrapper) -> None:
    """Runs asked for on ``lines``, until their other end is closed. serve: vLLM's module of that name."""
    send_all, cpu = serve.benchmark, 0.0

    async def send_all_on_go(*args: Any, **kwargs: Any) -> Any:
        nonlocal cpu
        lines.write("prepared\n")
        if lines.readline() != "go\n":
            raise RuntimeError("called off")
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        result = await send_all(*args, **kwargs)
        cpu = (time.process_time() - started_cpu_s) / (time.perf_counter() - started_s)
        return result

    serve.benchmark = send_all_on_go
    lines.write("ready\n")
    while line := lines.readline():
        try:
            answer = figures(serve.main(parser.parse_args(json.loads(line))), cpu)
        except (Exception, SystemExit) as error:  # the latter from arguments that vLLM does not know
            answer = {"error": f"{type(error).__name__}: {error}"}
        lines.write(json.dumps(answer) + "\n")


def main() -> int:
    os.dup2(2, 1)  # vLLM prints tables
    ends = [socket.socket(fileno=int(number)) for number in sys.argv[1:]]
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    for end in ends:
        if os.fork() == 0:
            for other in ends:
                if other is not end:
                    other.close()
            with end, end.makefile("rw") as lines:
                lines.reconfigure(line_buffering=True)
                serve_runs(serve, parser, lines)
            return 0
    for end in ends:
        end.close()
    return max(os.waitstatus_to_exitcode(os.wait()[1]) for _ in ends)


if __name__ == "__main__":
    sys.exit(main())
