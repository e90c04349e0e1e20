"""vLLM's load generator as a process that lasts, for ``compare_vllm.py``: one import of vLLM, many runs.

Reads a list of ``vllm bench serve`` arguments a line and answers with one line of JSON each: the requests' figures in
seconds, by the host's monotonic clock, and the share of a core that the client took.
"""

import json
import os
import sys
import time
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


def main() -> int:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM prints tables
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    answers.write("ready\n")
    for line in sys.stdin:
        arguments = parser.parse_args(json.loads(line))
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        try:
            result = serve.main(arguments)
            cpu = (time.process_time() - started_cpu_s) / (time.perf_counter() - started_s)
            answer = figures(result, cpu)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
