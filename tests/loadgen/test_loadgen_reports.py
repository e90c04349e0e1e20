"""What people look at: the page, the timeline, the live table, Markdown."""

import json
import random
import re
from array import array
from itertools import pairwise

import pytest
from loadgen_stub import answer, driver_result, options, result_of, sample

from loadgen import chrome, page, report
from loadgen.driver import Progress
from loadgen.figures import parse_limit
from loadgen.live import LiveTable
from loadgen.metrics import summarise
from loadgen.sample import ErrorKind


def many(num_requests):
    """A run of requests that came at 100 a second, each of 128 tokens, one in fifty failed."""
    rng = random.Random(3)
    samples = []
    for index in range(num_requests):
        due_s = index / 100
        sent_s = due_s + rng.expovariate(50)
        first_ms = rng.lognormvariate(4, 0.5)
        fails = index % 50 == 7
        read = answer([first_ms + 7.3 * i for i in range(128)], completion_tokens=128, prompt_tokens=500)
        samples.append(
            sample(
                answer() if fails else read,
                index=index,
                part=rng.choice(("ordinary", "agent")),
                intended_s=due_s,
                sent_s=sent_s,
                end_s=sent_s + first_ms / 1e3 + 0.93,
                error=ErrorKind.TIMEOUT if fails else None,
                detail="not ended </script><b>" if fails else "",
            )
        )
    return result_of(options(num_requests=num_requests), [driver_result(samples)])


def data_of(text):
    """What the page's script draws from."""
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)[1])


def test_the_page_of_10_000_requests_is_small_and_alone():
    """It stays below 1 MB, holds every request, and names nothing that a browser would fetch."""
    result = many(10_000)

    text = page.run_page(result, summarise(result))

    assert len(text.encode()) < 1_000_000
    data = data_of(text)
    assert len(data["requests"]) == 10_000
    assert data["tables"][-1]["rows"][0]["cells"][2] == "not ended </script><b>"
    assert data["statuses"] == ["ok", "left on purpose", "timeout"]
    assert not re.search(r"(?:src|href)=|@import|url\(|fetch\(|XMLHttp", text)
    assert re.findall(r"https?://[^\s\"'<,]+", text) == ["http://127.0.0.1:8000/v1/chat/completions"]


def test_the_page_says_what_is_wrong_with_its_figures():
    """Client-bound figures, broken limits and errors stand at the top."""
    run = options(limits=(parse_limit("e2e_ms_p50 < 1"),))
    driver = driver_result([sample(answer([5, 6]))], cpu_s=4.9, wall_s=5.0)
    result = result_of(run, [driver])

    alarms = data_of(page.run_page(result, summarise(result)))["alarms"]

    assert alarms == [
        "Client-bound: these figures are the load generator's own (CPU).",
        "Limit broken: e2e_ms_p50 < 1: it is 1000.",
    ]


def test_a_run_of_nothing_has_a_page_too():
    """Where every request failed there is still something to look at."""
    result = result_of(options(), [driver_result([sample(error=ErrorKind.CONNECT, sent_s=None, detail="refused")])])

    assert "refused" in page.run_page(result, summarise(result))


def test_rows_of_the_timeline_never_overlap():
    """Each row holds one request at a time, and there are no more rows than requests were out at once."""
    rng = random.Random(1)
    samples = [
        sample(index=i, process=i % 2, intended_s=(begin := rng.uniform(0, 10)), end_s=begin + rng.uniform(0.1, 2))
        for i in range(300)
    ]

    laid = list(chrome.rows(samples))

    for row in {(s.process, r) for s, r in laid}:
        spans = sorted((s.intended_s, s.end_s) for s, r in laid if (s.process, r) == row)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    at_once = max(
        sum(s.intended_s <= t.intended_s < s.end_s for s in samples if s.process == t.process) for t in samples
    )
    assert max(row for _, row in laid) == at_once


def test_the_timeline_has_the_phases_of_a_request():
    """Waiting, first token and tokens follow each other without a gap."""
    read = answer([200, 300, 400], completion_tokens=3)
    result = result_of(options(), [driver_result([sample(read, intended_s=1.0, sent_s=1.5, end_s=1.9)])])

    events = json.loads(chrome.to_trace(result))["traceEvents"]

    slices = [(e["cat"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert slices == [
        ("waiting", 1_000_000, 500_000),
        ("first token", 1_500_000, 200_000),
        ("tokens", 1_700_000, 200_000),
    ]
    assert any(e["ph"] == "C" and e["name"] == "loop lag" for e in events)


def test_markdown_holds_the_figures():
    """The table has a row for each latency, and the sentence says what it is of."""
    result = many(50)

    text = report.markdown(result, summarise(result))

    assert "49 requests succeeded, 1 failed" in text
    assert "| TTFT, first content, from send | " in text
    assert {line.count("|") for line in text.splitlines() if line.startswith("|")} == {8}


def progress(**fields):
    return Progress(
        **(
            {"process": 0, "at_s": 1.0, "num_ok": 3, "num_failed": 0, "num_out": 2, "num_events": 100}
            | {"ttft_ms": array("d", [10.0, 30.0]), "e2e_ms": array("d")}
            | fields
        )
    )


def test_the_live_table_adds_up_its_processes():
    """It draws when the last process has told, over the last drawing, and takes itself away at the end."""
    drawn = []
    table = LiveTable(options(num_requests=50), write=drawn.append)

    table.tell(progress())
    table.tell(progress(process=1, num_failed=1))
    table.tell(progress(at_s=2.0, num_events=300))
    table.tell(progress(process=1, at_s=2.0, num_events=300))
    table.clear()

    assert "6 ok  1 failed  4 out" in drawn[1]
    assert "2 s, 6 of 50" in drawn[-2]
    assert re.search(r"\b400 events/s", drawn[-2])
    assert "p50 20 ms" in drawn[-2]
    assert drawn[-2].startswith("\x1b[3F\x1b[J")
    assert drawn[-1] == "\x1b[3F\x1b[J"


@pytest.mark.parametrize("num_values", [1, 60])
def test_the_live_table_fits_its_terminal(num_values):
    """No line is longer than the terminal is wide, however long the run."""
    drawn = []
    table = LiveTable(options(num_requests=50), write=drawn.append, width=40)

    for number in range(num_values):
        table.tell(progress(at_s=number + 1.0, num_events=100 * number))

    assert max(len(line) for line in drawn[-1].replace("\x1b[3F\x1b[J", "").splitlines()) <= 40
