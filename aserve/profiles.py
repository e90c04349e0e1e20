"""Profiles: named sets of option values for a goal. They stand between the defaults and whatever was set explicitly.

Data only: ``config.py`` checks and applies it, ``tests/e2e/bench_profiles.py`` measures what each one buys.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Choice:
    """One option under a profile: the value, typed as in a config file, and the reason in a sentence."""

    value: Any
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """``goal`` completes "for ...". ``choices`` is by option name, section.key."""

    goal: str
    choices: Mapping[str, Choice]


def _profile(goal: str, choices: dict[str, Choice]) -> Profile:
    return Profile(goal=goal, choices=MappingProxyType(choices))


PROFILES: Final[Mapping[str, Profile]] = MappingProxyType(
    {
        "throughput": _profile(
            "the most tokens a second from many requests at once, such as a batch job; each one waits longer",
            {
                "scheduler.max_num_seqs": Choice(128, "Each reading of the weights serves more rows."),
                "scheduler.max_num_batched_tokens": Choice(
                    1024, "Beside so many rows there has to be room for prompts, in chunks that fill the matrix units."
                ),
                "scheduler.long_prefill_threshold": Choice(
                    8192, "Nobody waits for a first token, so long prompts need not stand back."
                ),
                "scheduler.max_long_partial_prefills": Choice(8, "The same: prompts are taken as they come."),
                "scheduler.watermark": Choice(
                    0.05, "Room for many rows to grow: a preempted sequence is computed twice."
                ),
                "engine.max_queue_requests": Choice(16384, "A batch job sends everything at once and wants to wait."),
                "engine.fan_out_slice": Choice(256, "A landing is delivered in one go; nobody needs the loop sooner."),
            },
        ),
        "latency": _profile(
            "few users who watch the answer appear: quick first tokens and an even pace",
            {
                "scheduler.max_num_seqs": Choice(16, "A step takes longer with each row; further requests queue."),
                "scheduler.max_num_batched_tokens": Choice(
                    128, "A newcomer's prompt holds up the running answers by one small chunk at a time."
                ),
                "scheduler.policy": Choice("sync", "No step is queued ahead, so a newcomer joins the very next one."),
                "scheduler.long_prefill_threshold": Choice(512, "Prompts of a page and more let questions overtake."),
                "scheduler.max_long_partial_prefills": Choice(1, "One long prompt at a time, or all of them crawl."),
                "engine.max_queue_requests": Choice(64, "A refusal now is better than an answer in a minute."),
            },
        ),
        "agent": _profile(
            "programs that call in many turns: long prompts that begin as the last one did, and short answers",
            {
                "scheduler.enable_prefix_caching": Choice(
                    True, "A turn repeats all earlier ones: only the new is computed."
                ),
                "model.kv_cache_gib": Choice(
                    4.0,
                    "Conversations stay cached while tools run; the automatic pool is made for answers in progress.",
                ),
                "scheduler.max_num_seqs": Choice(
                    32, "Turns with long contexts; more rows than this would compete for blocks."
                ),
                "scheduler.max_num_batched_tokens": Choice(
                    1024, "Turns are mostly prompt: tool output in, a few words out."
                ),
                "scheduler.long_prefill_threshold": Choice(4096, "Here a few thousand tokens are usual and not long."),
                "scheduler.max_long_partial_prefills": Choice(
                    4, "Agents start together; all of them have long first prompts."
                ),
                "limits.idle_timeout_s": Choice(300.0, "The connection survives a tool that runs for minutes."),
                "server.drain_timeout_s": Choice(
                    120.0, "A turn that is cut off at shutdown loses the work of its tools."
                ),
            },
        ),
        "edge": _profile(
            "a small machine that does other things too: little memory, few wake-ups",
            {
                "scheduler.max_num_seqs": Choice(
                    8, "A household, not a crowd, and as many rows as one reading of the weights serves."
                ),
                "model.quantization": Choice("auto", "Half the bytes to read a step, which is what a step's time is."),
                "scheduler.max_num_batched_tokens": Choice(
                    128, "The workspace of a step is as large as its token budget."
                ),
                "scheduler.max_model_len": Choice(
                    2048, "The KV pool holds full contexts; a conversation fits this one."
                ),
                "engine.max_queue_requests": Choice(16, "What four rows work off in a reasonable time."),
                "engine.mailbox_bytes": Choice(16384, "What a slow reader may hold, times the streams, is memory."),
                "limits.max_connections": Choice(64, "Each connection may hold buffers."),
                "limits.write_buffer_bytes": Choice(16384, "The same on the socket's side."),
                "limits.num_workers": Choice(1, "One thread tokenises: cores are few."),
                "log.ring_size": Choice(1024, "A short memory for log lines while the disk is slow."),
                "metrics.loop_lag_interval_ms": Choice(0, "No timer wakes an idle machine fifty times a second."),
            },
        ),
    }
)
"""By name, in the order in which they are shown."""
