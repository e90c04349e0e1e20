"""Sessions, behaviours and judgements of whole runs on virtual time."""

from itertools import pairwise

import pytest
from loadgen_stub import ScriptedServer, options, run_virtual, stream

from loadgen.arrivals import Bursts, ClosedLoop, Constant
from loadgen.lengths import Fixed
from loadgen.metrics import summarise, wilson
from loadgen.options import Slo
from loadgen.work import Behaviour, Mixture, RandomWords, Shaped

WORDS = RandomWords(lengths=Fixed(value=3))


def after(delay_s, num_tokens=2):
    """A server that answers each request with some tokens after a delay."""
    return ScriptedServer(lambda number, now: stream([delay_s] * num_tokens))


def roles(body):
    return [message["role"] for message in body["messages"]]


def test_a_session_sends_back_what_was_served():
    """Each turn holds the whole conversation, with the answers that the server gave."""
    server = after(0.5)
    source = Shaped(source=WORDS, turns=Fixed(value=3), think_ms=Fixed(value=2000))

    result = run_virtual(options(num_requests=1, source=source), server)

    assert [roles(body) for body in server.bodies] == [["user", "assistant"] * n + ["user"] for n in range(3)]
    assert server.bodies[2]["messages"][:3] == server.bodies[1]["messages"]
    assert server.bodies[1]["messages"][1]["content"] == "word word "
    assert [(s.index, s.turn) for s in result.samples] == [(0, 0), (0, 1), (0, 2)]
    assert [s.intended_s for s in result.samples] == pytest.approx([0.0, 2.5, 5.0], abs=0.01)
    assert [s.sent_s for s in result.samples] == pytest.approx([0.0, 2.5, 5.0], abs=0.01)


def test_a_session_may_send_back_drawn_answers():
    """With drawn answers the load does not depend on what the server says."""
    server = after(0.5)
    source = Shaped(source=WORDS, turns=Fixed(value=2), output=Fixed(value=5))

    run_virtual(options(num_requests=1, source=source, history="drawn"), server)

    assert len(server.bodies[1]["messages"][1]["content"].split()) == 5


def test_sessions_arrive_on_schedule():
    """An open run starts sessions when they are due, whatever the earlier ones are doing."""
    server = after(1.0)
    source = Shaped(source=WORDS, turns=Fixed(value=2))

    result = run_virtual(options(Constant(rate=4), num_requests=4, source=source), server)

    first = [s.sent_s for s in result.samples if s.turn == 0]
    assert first == pytest.approx([0.0, 0.25, 0.5, 0.75], abs=0.002)
    assert len(result.samples) == 8


def test_a_failed_turn_ends_its_session():
    """Nobody goes on talking after an error."""
    server = ScriptedServer(lambda number, now: [(0.1, b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n")])

    result = run_virtual(options(num_requests=2, source=Shaped(source=WORDS, turns=Fixed(value=3))), server)

    assert [(s.index, s.turn, s.error_name) for s in result.samples] == [(0, 0, "http_500"), (1, 0, "http_500")]


def test_users_of_a_ramp_begin_one_after_another():
    """A closed loop of four over two seconds sends its first requests half a second apart."""
    server = after(10.0)

    run_virtual(options(ClosedLoop(concurrency=4, ramp_s=2.0), num_requests=4), server)

    assert [b - a for a, b in pairwise(server.arrivals_s)] == pytest.approx([0.5] * 3, abs=0.002)


def test_a_storm_dials_anew_for_each_request():
    """With new connections every request pays for its own."""
    server = after(0.1)
    source = Shaped(source=WORDS, behaviour=Behaviour(is_on_new_connection=True))

    result = run_virtual(options(Bursts(size=5, every_s=1.0), num_requests=10, source=source), server)

    assert server.num_connections == 10
    assert server.num_out_max == 5
    assert all(s.connect_s is not None for s in result.samples)


def test_parts_that_are_not_measured_are_in_no_figure_but_their_own():
    """Those who leave do not pass for quick answers, and are counted as having left."""
    source = Mixture(
        parts=(
            (1.0, Shaped(source=WORDS, part="stays")),
            (1.0, Shaped(source=WORDS, part="leaves", behaviour=Behaviour(abort_after_tokens=1))),
        )
    )
    server = ScriptedServer(lambda number, now: stream([0.5, 1.0, 2.0]))

    summary = summarise(
        run_virtual(options(num_requests=40, source=source, unmeasured_parts=frozenset({"leaves"})), server)
    )

    assert set(summary.parts) == {"stays", "leaves"}
    assert summary.num_requests == summary.parts["stays"].num_requests
    assert summary.parts["leaves"].num_aborted == summary.parts["leaves"].num_requests > 5
    assert summary.parts["leaves"].e2e_ms is None
    assert summary.e2e_ms.sent.min == pytest.approx(2000, rel=0.01)


def test_goodput_counts_who_kept_every_limit():
    """Half the answers come in time; the share says so, with Wilson's interval around it."""
    server = ScriptedServer(lambda number, now: stream([0.1 if number % 2 else 0.3]))

    summary = summarise(run_virtual(options(num_requests=100, slo=Slo(ttft_ms=200)), server))

    assert (summary.goodput.num_good, summary.goodput.num_judged) == (50, 100)
    assert (summary.goodput.share_low, summary.goodput.share_high) == pytest.approx((0.404, 0.596), abs=0.001)
    assert summary.goodput.requests_per_s == pytest.approx(2.5, rel=0.02)


def test_goodput_counts_the_wait_before_the_send():
    """An answer that is quick once it is sent is no good one where it was sent late."""
    run = options(Constant(rate=10), num_requests=20, max_inflight=1, slo=Slo(e2e_ms=500))

    summary = summarise(run_virtual(run, after(0.2)))

    assert summary.e2e_ms.sent.max < 250
    assert summary.goodput.num_good < 10


@pytest.mark.parametrize(
    ("hits", "trials", "expected"), [(0, 10, (0.0, 0.2775)), (10, 10, (0.7225, 1.0)), (5, 10, (0.2366, 0.7634))]
)
def test_wilsons_interval(hits, trials, expected):
    """The bounds are those of the published formula."""
    assert wilson(hits, trials) == pytest.approx(expected, abs=1e-4)
