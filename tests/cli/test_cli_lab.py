"""The laboratory: what its experiments must show, what it writes, and its command line."""

import json
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest
from trace_rules import read_trace

from aserve.__main__ import main
from aserve.cli import bench_lab
from aserve.cli.arguments import split_options
from aserve.cli.lab.catalogue import EXPERIMENTS
from aserve.cli.lab.experiments_backlog import (
    cpu_bound,
    device_bound,
    matched,
    one_at_a_time,
    prefill_between_decodes,
)
from aserve.cli.lab.experiments_batching import dynamic_batching
from aserve.cli.lab.experiments_low_load import LOADS, TTFT_AT_MOST, low_load
from aserve.cli.lab.experiments_modes import prefill_modes, samplers
from aserve.cli.lab.findings import Claim, Experiment, Panel, Table, interval
from aserve.cli.lab.laboratory import Lab, poisson
from aserve.cli.lab.planning import plan
from aserve.cli.lab.plots import draw
from aserve.cli.lab.report import write
from aserve.cli.lab.shapes import h200
from aserve.cli.parsers import make_parser
from aserve.core.options import SchedulerOptions

RESULTS = Path(__file__).parents[2] / "aserve" / "cli" / "lab" / "results"


def unmet(experiment: Experiment, *words: str) -> list[str]:
    """Claims that hold all the words and were contradicted."""
    claims = [claim for claim in experiment.claims if all(word in claim.expected for word in words)]
    assert claims, f"nothing is claimed about {words}"
    return [f"{claim.expected}: {claim.found}" for claim in claims if claim.agreement == "contradicts"]


# --- what must be shown


@pytest.mark.parametrize("experiment", [one_at_a_time, device_bound, cpu_bound, matched])
def test_backlogs_take_what_the_study_measured(experiment) -> None:
    """Experiments 1 to 4: total times within 10 % of the study's, and overlap ahead of plain as there."""
    assert unmet(experiment(Lab())) == []


def test_a_prefill_between_decodes() -> None:
    """Experiment 5: its first token comes when it did; the device idles less."""
    assert unmet(prefill_between_decodes(Lab())) == []


@pytest.fixture(scope="module")
def batching() -> Experiment:
    return dynamic_batching(Lab(num_seeds=6))


def test_eager_launching_breaks_batches_apart(batching: Experiment) -> None:
    """Experiment 6: as many launches as in the study, in as much time."""
    assert unmet(batching, "eager pipeline breaks batches") == []
    assert unmet(batching, "which take it") == []


def test_late_launching_is_nowhere_worse(batching: Experiment) -> None:
    """Experiment 6: throughput and latency at least 0.99 of the best policy's, launches at most 1.5 times plain's."""
    assert unmet(batching, "late has") == []
    assert unmet(batching, "late launches at most 1.5") == []


def test_what_the_study_does_not_explain_is_said(batching: Experiment) -> None:
    """Figures of the study that no model gives are reported as contradictions, with a reason."""
    contradictions = [claim for claim in batching.claims if claim.agreement == "contradicts"]

    assert [claim.expected.partition(" (")[0] for claim in contradictions] == [
        "second run, with late launching: and its requests 4554 ms each",
        "second run, with late launching: with late launching a request waits 16 ms in the queue",
    ]
    assert all(claim.reason for claim in contradictions)


def test_at_low_load_late_launching_delays_nobody() -> None:
    """Experiment 7: the time to the first token is at most 1.02 of plain's, at each load and for both models."""
    found = low_load(Lab(policies=("plain", "late"), num_seeds=2))
    (table,) = found.tables
    shares = {row[:2]: float(str(row[4]).split(" ±")[0]) for row in table.rows if row[2] == "late"}

    assert len(shares) == 2 * len(LOADS)
    assert {where: share for where, share in shares.items() if share > TTFT_AT_MOST} == {}


def test_sampling_and_prefill() -> None:
    """Experiments 9 and 10 find what is expected of them."""
    assert unmet(samplers(Lab())) == []
    assert unmet(prefill_modes(Lab())) == []


def test_the_results_in_the_repository_are_of_all_experiments() -> None:
    """The page, the plots and the figures of each of the ten and of the sweep, with what must be shown in them."""
    results = json.loads((RESULTS / "results.json").read_text())
    page = (RESULTS / "README.md").read_text()
    claims = [claim for experiment in results["experiments"] for claim in experiment["claims"]]

    assert [experiment["number"] for experiment in results["experiments"]] == list(EXPERIMENTS)
    assert [name for name in _linked(page) if not (RESULTS / name).is_file()] == []
    assert [claim["expected"] for claim in claims if claim["agreement"] == "contradicts" and not claim["reason"]] == []
    for number in (1, 2, 3, 4):
        (experiment,) = [each for each in results["experiments"] if each["number"] == number]
        assert {claim["agreement"] for claim in experiment["claims"]} == {"agrees"}


def test_the_timelines_in_the_repository_open_in_a_viewer() -> None:
    """Those of the virtual device and of a GPU; each process is one setup of an experiment."""
    timelines = sorted(RESULTS.glob("**/timelines/*.json"))
    assert {file.parts[-3] for file in timelines} == {"results", "h200_8b"}
    for file in timelines:
        processes = read_trace(file.read_bytes())
        assert all(process.lanes["device"] for process in processes), file.name


def _linked(page: str) -> Iterator[str]:
    for part in page.split("](")[1:]:
        yield part.partition(")")[0]


# --- what it is made of


def test_a_run_is_decided_by_its_seed() -> None:
    """The same seed gives the same arrivals; on average they come at the rate."""
    assert poisson(50.0, 100, seed=3) == poisson(50.0, 100, seed=3) != poisson(50.0, 100, seed=4)
    assert poisson(50.0, 5000, seed=1)[-1].at_s == pytest.approx(100.0, rel=0.05)


def test_an_interval_is_student_s() -> None:
    """Five values with mean 3 and deviation 1.581: 2.776 times 0.707 on each side."""
    found = interval([1, 2, 3, 4, 5])

    assert (found.mean, found.half) == (3, pytest.approx(2.776 * 0.70711, rel=1e-3))
    assert str(found) == "3.000 ± 1.963"


def test_charts_are_well_formed() -> None:
    """Names are escaped, gaps left out, and the same panels draw the same picture."""
    panels = [
        Panel(title="a < b & c", unit="ms", x=("plain", "late"), series={"here": [1, 2], "study": [3, float("nan")]}),
        Panel(title="lines", unit="", kind="lines", x=("1", "2"), series={"<x>": [0.9, 1.1]}, low=0.5, x_title="n"),
        Panel(title="nothing", unit="", x=("",), series={"here": [0]}),
    ]
    picture = draw(panels, "A & B")
    bars = [each for each in ElementTree.fromstring(picture).iter() if each.get("rx") == "1.5"]

    assert picture == draw(panels, "A & B")
    assert len(bars) == 4
    assert "nan" not in picture


def test_what_was_found_is_written(tmp_path: Path) -> None:
    """A page with the table, the claims and the reasons, the same as JSON, and a timeline for each policy."""
    found = device_bound(Lab())
    odd = Experiment(
        number=0,
        title="Odd",
        about="Nothing.",
        tables=(Table(title="t", columns=("a", "b ms"), rows=((1, None), (12_345, 0.5))),),
        claims=(Claim.of("one", True, "1"), Claim.of("two", False, "3", reason="because")),
    )
    write(tmp_path, [found, odd], command="python", device="virtual")
    page = (tmp_path / "README.md").read_text()
    timelines = json.loads((tmp_path / "timelines" / "02.json").read_text())["traceEvents"]

    assert "| 1 |  |\n| 12,345 | 0.5 |" in page
    assert "Those that were not:\n\n- Odd: two: **3**. Why: because.\n" in page
    assert [each["args"]["name"] for each in timelines if each["name"] == "process_name"] == [
        "plain",
        "overlap",
        "late",
    ]
    assert json.loads((tmp_path / "results.json").read_text())["experiments"][1]["claims"][1]["reason"] == "because"
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == ["02.svg"]


@pytest.mark.parametrize(("rate", "keeps_up"), [(20.0, True), (400.0, False)])
def test_a_plan_says_whether_the_model_keeps_up(rate: float, keeps_up: bool) -> None:
    """8B with 512 tokens in and 32 out does some 60 requests a second."""
    found = plan(
        h200("8b"), rate, SchedulerOptions(policy="late"), num_prompt_tokens=512, num_output_tokens=32, num_requests=120
    )

    assert found.keeps_up == keeps_up
    assert any("does not keep up" in line for line in found.lines()) != keeps_up


# --- the command


def test_the_command_writes_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Experiments by number, in this process, and a word about each."""
    assert main(["bench", "lab", "--experiments", "2", "4", "--jobs", "1", "--out", str(tmp_path / "found")]) == 0
    assert "Device-bound backlog: 3 of 3 expectations met" in capsys.readouterr().out
    assert "python -m aserve bench lab --experiments 2 4" in (tmp_path / "found" / "README.md").read_text()


def written_command(*arguments: str) -> str:
    """What the page says behind ``python -m aserve bench lab`` after these arguments."""
    parser = make_parser("bench lab")
    rest, assignments = split_options(arguments)
    args = parser.parse_args(rest)
    args.assignments = [*args.assignments, *assignments]
    return bench_lab._command(args).removeprefix("python -m aserve bench lab").strip()


@pytest.mark.parametrize(
    "command",
    [
        "",
        "--device cuda FOLDER --model.load_format dummy --seeds 2 --shape 8b --experiments 6 7 10",
        "--device cpu org/model --dtype float32 --reference --max-num-seqs 8 --shape 1b --policies plain,late",
        "--profile latency --config my.toml --model.reference false --set scheduler.policy=late --experiments 6 sweep",
    ],
)
def test_the_page_says_what_it_was_made_with(command: str) -> None:
    """All that was given counts, and what is written means the same when it is given again."""
    assert shlex.split(written_command(*shlex.split(command))) == shlex.split(command)


def test_the_page_names_no_place_of_this_machine(tmp_path: Path) -> None:
    """Nor where results went, in how many processes, or a key; of a model's folder the name is left."""
    folder = tmp_path / "tiny llama"
    folder.mkdir()
    model, file = f"{folder}/", str(tmp_path / "my.toml")
    others = ["--out", str(tmp_path), "--jobs", "1", "--set", "server.api_keys=k", "--log.file", str(tmp_path / "log")]

    assert written_command(model, "--config", file, *others) == "'tiny llama' --config my.toml"
    assert written_command("--model", model, "--model.cache_dir", str(tmp_path)) == (
        f"--model 'tiny llama' --model.cache_dir {tmp_path.name}"
    )
    assert written_command("--set", f"model.model={model}") == "--set 'model.model=tiny llama'"


def test_every_flag_of_the_lab_is_in_the_command() -> None:
    """A flag that changes results cannot be forgotten: each is written down or left out on purpose."""
    flags = {flag for action in make_parser("bench lab")._actions for flag in action.option_strings}
    on_purpose = {"-h", "--help", "--out", "--jobs", "--plan", "--prompt-tokens", "--output-tokens", "--requests"}
    given = (
        "--device cpu --profile edge --config f --model m --served-model-name n --dtype float32 --threads 1 "
        "--reference --max-num-seqs 8 --max-num-batched-tokens 64 --max-model-len 64 --block-size 16 --num-blocks 9 "
        "--policy late --set scheduler.prefill=split --seeds 3 --shape 1b --policies late --experiments 6"
    ).split()

    assert flags - on_purpose == {word for word in given if word.startswith("--")}
    assert written_command(*given).split() == given


def test_the_command_plans(capsys: pytest.CaptureFixture[str]) -> None:
    """The engine's own options count."""
    arguments = ["--plan", "5", "--shape", "1b", "--output-tokens", "8", "--requests", "12", "--policy", "sync"]
    assert main(["bench", "lab", *arguments]) == 0
    assert "1B on one H200 at 5 requests/s, 512 tokens in, 8 out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--experiments", "11"], "--experiments takes 1 to 10 and sweep, not '11'."),
        (["--policies", "plain,lazy"], "--policies takes names out of plain, overlap, eager, late, not 'plain,lazy'."),
        (["--seeds", "1"], "--seeds is at least 2, for there is no interval of one, and --jobs at least 1."),
        (["--device", "cpu", "--experiments", "3"], "--experiments: 3 are told what a step takes"),
        (["--plan", "0"], "--plan is 0.01 to 1,000,000 requests/s, not 0."),
        (["--plan", "nan"], "--plan is 0.01 to 1,000,000 requests/s, not nan."),
        (["--plan", "inf"], "--plan is 0.01 to 1,000,000 requests/s, not inf."),
        (["--plan", "1e20"], "--plan is 0.01 to 1,000,000 requests/s, not 1e+20."),
        (["--plan", "5", "--output-tokens", "0"], "--prompt-tokens and --output-tokens are more than 0."),
        (["--plan", "5", "--requests", "1"], "--requests is at least 4: whether waits grow shows between quarters"),
        (["--plan", "5", "--requests", "3"], "--requests is at least 4: whether waits grow shows between quarters"),
    ],
)
def test_mistakes_are_answered(capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str) -> None:
    """One sentence, exit code 2, and nothing is run."""
    assert main(["bench", "lab", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_its_parser_is_light() -> None:
    """--help loads neither the laboratory nor what it stands on."""
    program = (
        "import sys; from aserve.cli.parsers import make_parser; make_parser('bench lab')\n"
        "print(sorted({'torch', 'numpy', 'asyncio', 'aserve.testing'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)

    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_help_of_the_lab(capsys: pytest.CaptureFixture[str]) -> None:
    """It is a command below bench, with its own flags beside the engine's options."""
    with pytest.raises(SystemExit) as end:
        main(["bench", "lab", "--help"])

    assert end.value.code == 0
    assert "--experiments N [N ...]" in capsys.readouterr().out
