"""Whole runs of one process against scripted servers, on virtual time."""

import random
from itertools import accumulate, pairwise
from statistics import quantiles

import pytest
from loadgen_stub import CLOSE, END, HEAD, ScriptedServer, chunk, content, finish, options, run_virtual, stream

from loadgen.arrivals import ClosedLoop, Poisson, due_s
from loadgen.client import BODY_END_TIMEOUT_S
from loadgen.metrics import summarise


def after(delay_s):
    """A server that answers each request with two tokens after a delay."""
    return ScriptedServer(lambda number, now: stream([delay_s, delay_s]))


def percentiles(values):
    cuts = quantiles(values, n=100, method="inclusive")
    return [cuts[49], cuts[89], cuts[94], cuts[98], max(values)]


def found(distribution):
    return [getattr(distribution, name) / 1e3 for name in ("p50", "p90", "p95", "p99", "max")]


def test_every_percentile_is_the_scripts():
    """With jitter, pauses and bursts in the script, all latencies are the script's own within 2 %."""
    rng = random.Random(1)
    ttft_s, gap_s, e2e_s, tpot_s = [], [], [], []

    def answer(number, now):
        gaps = [rng.choice([rng.expovariate(50), 0.02, 0.02, rng.uniform(0.1, 0.3)]) for _ in range(rng.randint(2, 30))]
        times = list(accumulate([rng.lognormvariate(-2, 0.8), *gaps]))
        ttft_s.append(times[0])
        gap_s.extend(b - a for a, b in pairwise(times))
        tpot_s.append((times[-1] - times[0]) / len(gaps))
        e2e_s.append(times[-1])
        return stream(times)

    result = run_virtual(options(ClosedLoop(concurrency=16), num_requests=600), ScriptedServer(answer))

    summary = summarise(result)
    assert summary.num_measured == 600
    assert found(summary.first_content_ms.sent) == pytest.approx(percentiles(ttft_s), rel=0.02)
    assert found(summary.inter_token_ms) == pytest.approx(percentiles(gap_s), rel=0.02)
    assert found(summary.tpot_ms) == pytest.approx(percentiles(tpot_s), rel=0.02)
    assert found(summary.e2e_ms.sent) == pytest.approx(percentiles(e2e_s), rel=0.02)


def test_a_stall_shows_from_the_intended_time():
    """A stall of 3 s delays every request due meanwhile; only the intended times tell of those not yet sent."""

    def answer(number, now):
        stalled_s = max(0.0, 1013.0 - now) if now >= 1010.0 else 0.0
        return stream([stalled_s + 0.005])

    run = options(Poisson(rate=100), num_requests=None, duration_s=30.0, max_inflight=4)
    result = run_virtual(run, ScriptedServer(answer))

    summary = summarise(result)
    num_due_in_stall = sum(10.0 <= s.intended_s < 13.0 for s in result.samples)
    num_slow_from_send = sum(s.end_s - s.sent_s > 0.1 for s in result.samples)
    num_slow_from_intended = sum(s.end_s - s.intended_s > 0.1 for s in result.samples)
    assert num_due_in_stall > 250
    assert num_slow_from_send == 4
    assert num_slow_from_intended > 0.9 * num_due_in_stall
    assert summary.e2e_ms.sent.p99 < 10
    assert summary.e2e_ms.intended.p99 > 2000
    assert summary.client.num_held_back > 250
    assert summary.client.bound_by == ()


def test_requests_go_out_on_schedule_whatever_the_server_does():
    """Open arrivals do not wait for answers."""
    server = after(5.0)
    run = options(Poisson(rate=20), num_requests=100, seed=4)

    run_virtual(run, server)

    times_s = due_s(run.arrivals, seed=4, num_requests=100)
    late_s = [arrived - 1000.0 - due for arrived, due in zip(server.arrivals_s, times_s, strict=True)]
    assert min(late_s) > -1e-6
    assert max(late_s) < 0.002
    assert server.num_out_max > 50


@pytest.mark.parametrize("concurrency", [1, 3, 32])
def test_a_closed_loop_keeps_its_concurrency(concurrency):
    """There are never more requests out than users, and all users work; each keeps one connection."""
    rng = random.Random(2)
    server = ScriptedServer(lambda number, now: stream([rng.uniform(0.01, 1.0)]))

    result = run_virtual(options(ClosedLoop(concurrency=concurrency), num_requests=200), server)

    assert sorted(s.index for s in result.samples) == list(range(200))
    assert server.num_out_max == concurrency
    assert server.num_connections == concurrency


def test_the_bound_of_requests_in_flight_holds():
    """An open run never has more out than allowed, and says how many it held back."""
    server = after(1.0)

    result = run_virtual(options(Poisson(rate=100), num_requests=50, max_inflight=5), server)

    assert server.num_out_max == 5
    assert result.drivers[0].num_held_back >= 40
    assert len(result.samples) == 50


def test_a_duration_ends_the_sending_and_not_the_answers():
    """Nothing is sent after the duration; what is out is waited for."""
    server = after(0.4)

    result = run_virtual(options(ClosedLoop(concurrency=2), duration_s=1.0), server)

    assert len(result.samples) == 6
    assert all(s.is_ok for s in result.samples)
    assert max(server.arrivals_s) < 1001.0


def test_warm_up_requests_come_before_the_start_and_count_nowhere():
    """Warm-up requests are of other prompts, leave warm connections, and are in no sample."""
    server = after(0.1)

    result = run_virtual(options(ClosedLoop(concurrency=2), num_requests=6, num_warmup_requests=4), server)

    assert len(server.bodies) == 10
    assert len({body["messages"][0]["content"] for body in server.bodies}) == 10
    assert [s.index for s in result.samples] == list(range(6))
    assert min(s.sent_s for s in result.samples) == 0.0
    assert all(s.connect_s is None for s in result.samples)


def test_processes_share_the_run_of_one():
    """The bodies and due times of three processes together are those of one."""
    alone, together = after(0.1), [after(0.1) for _ in range(3)]
    run_virtual(options(Poisson(rate=50), num_requests=40), alone)
    for process, server in enumerate(together):
        run_virtual(options(Poisson(rate=50), num_requests=40, num_processes=3), server, process=process)

    def sent(servers):
        return sorted(
            (round(at_s, 2), body["messages"][0]["content"])
            for server in servers
            for at_s, body in zip(server.arrivals_s, server.bodies, strict=True)
        )

    assert [text for _, text in sent([alone])] == [text for _, text in sent(together)]
    assert [at for at, _ in sent([alone])] == pytest.approx([at for at, _ in sent(together)], abs=0.002)


def test_a_request_that_never_ends_times_out():
    """A stream that stops in the middle is a timeout after the set time, and its connection is not used again."""
    server = ScriptedServer(
        lambda number, now: [(0.0, HEAD), (0.5, chunk(content()))] if number == 0 else stream([0.1])
    )

    result = run_virtual(options(num_requests=2, timeout_s=3.0), server)

    first, second = result.samples
    assert (first.error_name, first.end_s) == ("timeout", pytest.approx(3.0))
    assert len(first.answer.event_ns) == 1
    assert second.is_ok
    assert server.num_connections == 2


def test_a_body_that_does_not_end_after_done_costs_only_its_connection():
    """[DONE] makes the request succeed; waiting for the body's end is bounded."""
    server = ScriptedServer(lambda number, now: [(0.5, HEAD + chunk(content() + finish(completion_tokens=1)))])

    result = run_virtual(options(num_requests=2), server)

    assert [s.error for s in result.samples] == [None, None]
    assert result.samples[0].end_s == pytest.approx(0.5)
    assert server.arrivals_s[1] - server.arrivals_s[0] == pytest.approx(0.5 + BODY_END_TIMEOUT_S)
    assert server.num_connections == 2


def test_a_server_that_closes_connections_is_followed():
    """A connection closed after an answer is replaced, without an error."""
    server = ScriptedServer(lambda number, now: [*stream([0.1]), (0.11, CLOSE)])

    result = run_virtual(options(Poisson(rate=1), num_requests=3, seed=1), server)

    assert [s.error for s in result.samples] == [None] * 3
    assert server.num_connections == 3
    assert summarise(result).num_resent == 0


def test_a_request_lost_to_a_closing_connection_is_sent_again_and_counted():
    """A kept connection that the server closes under the next request costs a new one and shows in the report."""
    server = ScriptedServer(lambda number, now: [*stream([0.1]), (0.1, CLOSE)])

    result = run_virtual(options(num_requests=2), server)

    assert [(s.error, s.is_resent) for s in result.samples] == [(None, False), (None, True)]
    assert server.num_connections == 2
    assert summarise(result).num_resent == 1


def test_bytes_that_nobody_asked_for_close_the_connection():
    """A late extra chunk on a kept connection does not reach the next request."""
    server = ScriptedServer(lambda number, now: [*stream([0.1]), (0.15, END)] if number == 0 else stream([0.1]))

    result = run_virtual(options(Poisson(rate=2), num_requests=3), server)

    assert [s.error for s in result.samples] == [None] * 3


def test_an_interrupted_run_returns_what_there_is():
    """An interruption ends what is out and sends nothing more."""
    server = after(1.0)

    result = run_virtual(options(ClosedLoop(concurrency=4), num_requests=100), server, interrupt_after_s=2.5)

    assert [s.error_name for s in result.samples] == [""] * 8 + ["interrupted"] * 4
    assert [s.end_s for s in result.samples[8:]] == pytest.approx([2.5] * 4)


def test_an_interrupted_schedule_sends_nothing_more():
    """An open run that is waiting for its next due time or for a place ends too."""
    server = after(10.0)

    result = run_virtual(options(Poisson(rate=10), num_requests=100, max_inflight=4), server, interrupt_after_s=3.0)

    assert [s.error_name for s in result.samples] == ["interrupted"] * 4
    assert len(server.arrivals_s) == 4
