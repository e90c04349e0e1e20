"""Options of the log, the metrics and the trace."""

from dataclasses import dataclass, field
from typing import Any, Literal


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """Section ``[log]``."""

    level: Literal["debug", "info", "warning", "error"] = _option("info", "Records below this level are not made.")
    format: Literal["auto", "json", "pretty"] = _option(
        "auto", "JSON lines, or coloured lines for people; auto is pretty on a terminal."
    )
    file: str = _option("", "Append to this file, which may be rotated at any time; empty is standard error.")
    ring_size: int = _option(8192, "Records that wait to be written; the oldest are dropped and counted.")
    flush_interval_ms: int = _option(100, "How often waiting records are written.")
    close_timeout_s: float = _option(2.0, "How long the end of the program waits for the last records to be written.")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsOptions:
    """Section ``[metrics]``."""

    vllm_names: bool = _option(
        True, "Report under the vllm:* names too, which existing dashboards and autoscalers read."
    )
    process: bool = _option(True, "Report memory, CPU time and open files of the process.")
    loop_lag_interval_ms: int = _option(
        20, "How often the lateness of the event loop is sampled, 25 times as rarely while idle; 0 is never."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """Section ``[trace]``."""

    num_steps: int = _option(
        16384,
        "Steps that GET /v1/trace looks back on, and as many sequences; one of each takes 1.3 to 1.8 KB of memory. "
        "0 keeps none.",
    )
    nvtx: bool = _option(
        False, "Mark composing, launches, landings and steps in flight as NVTX ranges, for Nsight Systems; needs CUDA."
    )
