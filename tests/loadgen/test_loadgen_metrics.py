"""From samples to figures."""

import json
from array import array
from statistics import fmean, quantiles

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loadgen_stub import answer, driver_result, options, result_of, sample

from loadgen import report
from loadgen.client import parse_target
from loadgen.metrics import distribution, inter_token_ms, summarise, tpot_ms
from loadgen.sample import ErrorKind


def summary_of(*samples, run=None, **driver):
    return summarise(result_of(run or options(), [driver_result(list(samples), **driver)]))


@given(values=st.lists(st.floats(0, 1e6), min_size=2, max_size=300))
def test_percentiles_are_those_of_the_standard_library(values):
    """Linear interpolation, as statistics.quantiles defines it."""
    found = distribution(values)

    cuts = quantiles(values, n=100, method="inclusive")
    assert found.count == len(values)
    assert [found.p50, found.p90, found.p95, found.p99] == pytest.approx([cuts[49], cuts[89], cuts[94], cuts[98]])
    assert (found.min, found.max, found.mean) == (min(values), max(values), pytest.approx(fmean(values)))


def test_a_distribution_of_nothing_is_none():
    """No values have no percentiles; one value is all of them."""
    assert distribution([]) is None
    assert distribution([3.0]).p50 == distribution([3.0]).p99 == 3.0


def test_latency_from_both_times():
    """What passed between the intended time and the send is in the second figure only."""
    late = sample(answer([40, 50, 60], first_byte_ns=10_000_000), intended_s=1.0, sent_s=3.0, end_s=3.1)

    summary = summary_of(late)

    assert (summary.first_byte_ms.sent.p50, summary.first_byte_ms.intended.p50) == (10, 2010)
    assert (summary.first_content_ms.sent.p50, summary.first_content_ms.intended.p50) == (40, 2040)
    assert summary.e2e_ms.sent.p50 == pytest.approx(100)
    assert summary.e2e_ms.intended.p50 == pytest.approx(2100)


def test_time_of_an_output_token():
    """TPOT shares the time after the first event among the later tokens, by the server's count where it gives one."""
    assert tpot_ms(answer([100, 120, 140])) == 20
    assert tpot_ms(answer([100, 120, 140], completion_tokens=5)) == 10
    assert tpot_ms(answer([100, 120, 140], completion_tokens=9, event_tokens=[5, 6, 9])) == 10
    assert tpot_ms(answer([100])) is None


def test_tokens_that_come_together_have_no_gap_between_them():
    """An event of three tokens is one gap and two zeros."""
    joined = answer([100, 120, 150], completion_tokens=6, event_tokens=[2, 3, 6])

    assert inter_token_ms(joined) == [20, 30, 0, 0]


@pytest.mark.parametrize(
    ("read", "count"),
    [
        (answer([1, 2, 3]), None),
        (answer([1, 2, 3], completion_tokens=3), 2),
        (answer([1, 2, 3], completion_tokens=4), 2),
        (answer([1, 2, 3], completion_tokens=9), None),
        (answer([1, 2, 3], completion_tokens=9, event_tokens=[1, 2, 9]), 8),
    ],
    ids=["no usage", "a token an event", "an end token without text", "joined tokens", "continuous usage"],
)
def test_inter_token_latency_is_given_only_where_it_is_known(read, count):
    """Gaps between events are not passed off as gaps between tokens."""
    summary = summary_of(sample(read))

    assert summary.inter_chunk_ms.count == 2
    assert (summary.inter_token_ms.count if summary.inter_token_ms else None) == count


def test_throughput_counts_what_succeeded():
    """Requests, input and output tokens over the whole time; failures add nothing."""
    read = answer([100, 200], prompt_tokens=50, completion_tokens=10)

    summary = summary_of(
        sample(read, end_s=1.0), sample(read, sent_s=1.0, end_s=2.0), sample(read, end_s=2.0, error=ErrorKind.CUT)
    )

    assert summary.throughput.window_s == 2.0
    assert summary.throughput.requests_per_s == 1.0
    assert summary.throughput.input_tokens_per_s == 50.0
    assert summary.throughput.output_tokens_per_s == 10.0
    assert not summary.throughput.is_output_counted_by_events


def test_warm_up_and_cool_down_are_cut_off():
    """Latencies are of requests due inside the window, throughput of all tokens that came inside it."""
    steady = [1000.0 * second + 500 for second in range(10)]

    summary = summary_of(
        sample(answer(steady, completion_tokens=20), end_s=10.0),
        sample(answer([100, 200]), intended_s=5.0, sent_s=5.0, end_s=5.5),
        sample(answer([100, 300]), intended_s=9.0, sent_s=9.0, end_s=9.5),
        run=options(warmup_s=2.0, cooldown_s=2.0),
    )

    assert (summary.num_ok, summary.num_measured) == (3, 1)
    assert summary.inter_chunk_ms.max == 100
    assert summary.throughput.window_s == 6.0
    assert summary.throughput.requests_per_s == pytest.approx(1 / 6)
    assert summary.throughput.output_tokens_per_s == pytest.approx((6 * 2 + 2) / 6)


def test_errors_are_counted_by_kind():
    """Each kind is counted, refusals by status, with an example."""
    summary = summary_of(
        sample(),
        sample(error=ErrorKind.HTTP, status=503, detail="busy"),
        sample(error=ErrorKind.HTTP, status=503, detail="busier"),
        sample(error=ErrorKind.HTTP, status=400, detail="bad"),
        sample(error=ErrorKind.CONNECT, sent_s=None, detail="refused"),
    )

    assert (summary.num_requests, summary.num_ok) == (5, 1)
    assert summary.errors == {"connect": 1, "http_400": 1, "http_503": 2}
    assert summary.error_details == {"connect": "refused", "http_400": "bad", "http_503": "busy"}


@pytest.mark.parametrize(
    ("driver", "causes"),
    [
        ({}, ()),
        ({"cpu_s": 0.9}, ("CPU",)),
        ({"cpu_s": 0.4, "wall_s": 0.4}, ()),
        ({"cpu_shares": array("d", [0.1, 0.99, 0.99])}, ("CPU",)),
        ({"loop_lag_s": array("d", [0.001] * 50 + [0.05])}, ("loop lag",)),
    ],
)
def test_a_client_that_cannot_keep_up_says_so(driver, causes):
    """A busy processor or a late loop makes the figures the client's own."""
    assert summary_of(sample(), **driver).client.bound_by == causes


def test_a_late_sender_says_so():
    """Requests sent late by the client itself make the figures its own."""
    assert summary_of(sample(lag_s=0.5)).client.bound_by == ("send lag",)


def test_the_worst_process_counts():
    """One idle process does not excuse a busy one."""
    drivers = [driver_result([sample()]), driver_result([sample()], process=1, cpu_s=0.95)]

    assert summarise(result_of(options(), drivers)).client.bound_by == ("CPU",)


def test_the_report_of_a_run_without_success():
    """Where nothing succeeded the report says why and shows dashes."""
    result = result_of(options(), [driver_result([sample(error=ErrorKind.CONNECT, sent_s=None, detail="refused")])])

    text = report.table(result, summarise(result), is_colored=False)

    assert "0 ok, 1 failed" in text
    assert "1 × connect: refused" in text
    assert "TTFT, first content, from send             -" in text


def test_client_bound_is_red_on_a_terminal():
    """The warning stands out where colours are shown and is plain text elsewhere."""
    result = result_of(options(), [driver_result([sample()], cpu_s=0.99)])
    summary = summarise(result)

    assert "\x1b[1;31m            client-bound" in report.table(result, summary, is_colored=True)
    assert "\n            client-bound: the figures above are this program's own (CPU)" in report.table(
        result, summary, is_colored=False
    )


def test_the_json_keeps_every_sample_and_no_key():
    """Each request's times, tokens and error are in the file; the key is not."""
    target = parse_target("http://h", "chat", api_key="sk-secret", headers={"x-token": "hidden"})
    run = options(target=target, labels={"commit": "abc"})
    read = answer([1.5, 2.5], completion_tokens=2, prompt_tokens=3)
    result = result_of(run, [driver_result([sample(read), sample(index=1, error=ErrorKind.CUT)])])

    data = report.to_json(result, summarise(result))

    assert b"secret" not in data
    assert b"hidden" not in data
    fields = json.loads(data)
    assert fields["options"]["labels"] == {"commit": "abc"}
    assert fields["summary"]["errors"] == {"cut": 1}
    assert [r["event_us"] for r in fields["requests"]] == [[1500, 2500], []]
    assert [r["error"] for r in fields["requests"]] == [None, "cut"]
