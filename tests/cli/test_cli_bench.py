"""The quick measurement: which points it makes, what it counts, and how it prints them."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from aserve.__main__ import main
from aserve.cli import bench, bench_points
from aserve.cli.bench_points import DecodePoint, FirstTokenPoint, Points, PrefillPoint, Report
from aserve.config import Config
from aserve.core.plan import BatchPlan
from aserve.embedding import Engine
from aserve.testing import ByteTokenizer, ScriptedRunner

REPORT = Report(
    version="1", model="tiny", device="cpu", profile="edge", method="fairly", load_s=1.0, measured_s=2.0,
    others_cpu_share=0.0,
    prefill=(PrefillPoint(num_tokens=512, tokens_per_s=1000.0, chunk_ms=512.0, num_runs=3),),
    decode=(DecodePoint(num_sequences=8, tokens_per_s=80.0, tokens_per_s_each=10.0, token_ms=100.0, window_s=1.5),),
    first_token=FirstTokenPoint(num_prompt_tokens=48, median_ms=30.0, max_ms=40.0, num_runs=4),
    left_out=("chunks beyond 512 tokens",),
)  # fmt: skip


@asynccontextmanager
async def points(runner: ScriptedRunner, **options: Any) -> AsyncIterator[Points]:
    config = Config()
    async with Engine.from_runner(runner, ByteTokenizer(), **options) as engine:
        yield Points(engine, replace(config, scheduler=replace(config.scheduler, **options)))


def per_token(plan: BatchPlan) -> float:
    """A device that takes 0.1 ms a prompt token and 1 ms a decode step."""
    return 0.0001 * sum(len(chunk.tokens) for chunk in plan.chunks) + (0.001 if len(plan.rows) else 0.0)


async def test_prefill_is_one_chunk() -> None:
    """A prompt goes through in one step; its time is what that step takes and little more."""
    runner = ScriptedRunner(step_time_s=per_token)
    async with points(runner) as measured:
        point = await measured.prefill(256, 0.0)

    assert {len(plan.chunks[0].tokens) for plan in runner.log if plan.chunks} == {256}
    assert 25.6 <= point.chunk_ms < 60
    assert point.num_runs == bench_points.NUM_RUNS_MIN
    assert sum(1 for plan in runner.log if plan.chunks) == point.num_runs + 1


async def test_no_run_hits_the_prefix_cache() -> None:
    """Each prompt is new."""
    runner = ScriptedRunner()
    async with points(runner) as measured:
        await measured.prefill(128, 0.0)
        hits = measured._engine.statistics().prefix_cache_hits

    assert hits == 0


async def test_decoding_counts_while_all_of_them_write() -> None:
    """Eight sequences, a millisecond a step: not more than 8,000 tokens a second, and every row is there."""
    runner = ScriptedRunner(step_time_s=0.001)
    async with points(runner) as measured:
        point = await measured.decode(8, 0.2)

    assert max(len(plan.rows) for plan in runner.log) == 8
    assert 500 < point.tokens_per_s <= 8 * 1000 * 1.05
    assert point.tokens_per_s_each == pytest.approx(point.tokens_per_s / 8, rel=0.01)
    assert point.window_s == pytest.approx(0.2, abs=0.15)


async def test_a_window_ends_with_its_first_sequence() -> None:
    """Where the context ends sooner than the time, the window does too."""
    async with points(ScriptedRunner(step_time_s=0.001, max_model_len=64)) as measured:
        point = await measured.decode(2, 60.0)

    assert point.window_s < 10


async def test_points_that_do_not_fit_are_left_out() -> None:
    """Options that do not allow a point leave it out, with the reason."""
    async with points(ScriptedRunner(max_num_seqs=8), max_num_batched_tokens=128, max_num_seqs=8) as measured:
        chunks, batches, left_out = measured.possible()

    assert (chunks, batches) == ([16, 64, 128], [1, 8])
    assert [text.partition(" (")[0] for text in left_out] == ["chunks beyond 128 tokens", "batches beyond 8 sequences"]


def test_the_table() -> None:
    """Every figure is in the text, and the points that were left out."""
    text = "\n".join(bench.as_text(REPORT))

    assert "tiny on cpu, aserve 1, profile edge" in text
    assert "   512 tok       1000        512.0   3 runs" in text
    assert "     8 seq       80.0            10.0        100.0   over 1.5 s" in text
    assert "30.0 ms median, 40.0 ms at most, 4 runs" in text
    assert "left out: chunks beyond 512 tokens" in text
    assert "Other programs" not in text


def test_a_busy_machine_is_told() -> None:
    """Figures taken beside other work say so."""
    text = "\n".join(bench.as_text(replace(REPORT, others_cpu_share=0.42)))

    assert "Other programs used 42% of the machine's cores meanwhile: alone on it, these figures are better." in text


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints the report as it is, for the seconds that were asked for."""
    asked: list[float] = []

    def measure(config: Config, *, seconds: float, say: Any) -> Report:
        asked.append(seconds)
        return REPORT

    monkeypatch.setattr(bench_points, "measure", measure)

    assert main(["bench", "--json", "--seconds", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (asked, found["decode"][0]["tokens_per_s"], found["profile"]) == ([3.0], 80.0, "edge")


def test_too_short_a_time_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Less than two seconds measure nothing."""
    assert main(["bench", "--seconds", "1"]) == 2
    assert capsys.readouterr().err == "aserve: --seconds: 1 is too short; at least 2.\n"
