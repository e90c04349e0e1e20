"""Scenario files and what they make."""

import re

import pytest

from loadgen import scenario
from loadgen.arrivals import ClosedLoop, Gamma, Poisson, Recorded
from loadgen.client import parse_target
from loadgen.errors import UsageError
from loadgen.lengths import Calibration

TARGET = parse_target("http://127.0.0.1:8000", "chat", api_key=None, headers={})


def build(document, **overrides):
    """Make the options of a document with overrides, on a server that counts two tokens a word."""
    return scenario.build(
        document.with_overrides(overrides),
        target=TARGET,
        model="m",
        calibrate=lambda template, language: Calibration(tokens_per_word=2.0),
        labels={},
    )


def written(tmp_path, text):
    """A scenario file with a text."""
    file = tmp_path / "mine.toml"
    file.write_text(text)
    return scenario.load(str(file))


@pytest.mark.parametrize("name", scenario.names())
def test_the_library_is_whole(name):
    """Every scenario of the library makes a run whose prompts can be drawn, and says what it is about."""
    document = scenario.load(name)
    options = build(document)

    assert document.fields["about"].endswith(".")
    assert options.name == name
    for index in range(30):
        for turn in range(options.source.num_turns(index, 0)):
            options.template.body(options.source.ask(index, turn, 0))


def test_the_library_has_what_people_measure():
    """The names that the README promises."""
    assert {"chat", "rag", "agent", "batch", "burst", "hostile", "trace"} <= set(scenario.names())


def test_both_published_formats_have_a_sample():
    """The trace scenario takes either format, with its times and lengths."""
    mooncake = build(scenario.load("trace"))
    azure = build(scenario.load("trace"), trace={"file": "sample_azure.csv", "format": "azure"})

    assert isinstance(mooncake.arrivals, Recorded) and isinstance(azure.arrivals, Recorded)
    assert mooncake.num_requests == azure.num_requests == 48


def test_a_scenario_says_everything(tmp_path):
    """Tables become arrivals, lengths, behaviour and limits."""
    options = build(
        written(
            tmp_path,
            """
            limits = ["ttft_ms_p99 < 500"]
            [run]
            duration_s = 30
            seed = 7
            [request]
            endpoint = "completions"
            max_tokens = 9
            [arrivals]
            kind = "gamma"
            rate = 2
            burstiness = 0.5
            [work]
            unit = "tokens"
            input = 100
            output = { kind = "uniform", min = 3, max = 4 }
            [slo]
            ttft_ms = 200
            """,
        )
    )

    assert options.arrivals == Gamma(rate=2, burstiness=0.5)
    assert (options.duration_s, options.num_requests, options.seed) == (30, None, 7)
    assert (options.template.endpoint, options.template.max_tokens) == ("completions", 9)
    assert len(options.source.ask(0, 0, 7).text.split()) == 50
    assert {options.source.ask(i, 0, 7).max_tokens for i in range(30)} == {3, 4}
    assert (options.slo.ttft_ms, str(options.limits[0])) == (200, "ttft_ms_p99 < 500")


def test_parts_are_mixed_and_some_not_measured(tmp_path):
    """Parts have names and behaviour of their own; those that are not measured are known to the figures."""
    options = build(scenario.load("hostile"))

    parts = {(ask := options.source.ask(index, 0, 0)).part: ask for index in range(300)}
    assert "ordinary" not in options.unmeasured_parts
    assert set(parts) - {"ordinary"} == options.unmeasured_parts
    assert parts["leaves in the middle"].behaviour.abort_after_tokens == 5
    assert parts["sends no JSON"].raw_body == '{"messages": [{"role": "user"'
    assert parts["storms"].behaviour.is_on_new_connection


def test_nothing_at_all_is_a_run_too():
    """Without a scenario there are eight users with random words."""
    options = build(scenario.EMPTY)

    assert options.arrivals == ClosedLoop(concurrency=8)
    assert options.num_requests == scenario.NUM_REQUESTS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("arrivals.rate=5", {"arrivals": {"rate": 5}}),
        ("work.input={kind='uniform', min=1, max=2}", {"work": {"input": {"kind": "uniform", "min": 1, "max": 2}}}),
        ("trace.file=/tmp/x.csv", {"trace": {"file": "/tmp/x.csv"}}),
        ("name=mine", {"name": "mine"}),
    ],
)
def test_overrides_are_toml_or_bare_strings(text, expected):
    """A value is read as TOML where it is, else as it stands."""
    assert scenario.parse_override(text) == expected


def test_an_override_replaces_one_key():
    """The rest of the table stays."""
    options = build(scenario.load("rag"), arrivals={"rate": 9})

    assert options.arrivals == Poisson(rate=9)
    assert options.source.source.num_groups == 12


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[run]\nnum_requests = 0", r"mine.toml \[run\] num_requests must be at least 1, not 0"),
        ("[run]\nnum_request = 5", r"\[run\] has no key num_request; did you mean num_requests\?"),
        ("[runs]\nseed = 5", "mine.toml has no key runs; did you mean run?"),
        ("[run]\nseed = true", "seed must be a whole number, not True"),
        ("[arrivals]\nkind = 'poison'", r"\[arrivals\] kind must be closed or .*; did you mean poisson\?"),
        ("[arrivals]\nkind = 'poisson'", "rate is missing"),
        ("[arrivals]\nkind = 'poisson'\nrate = inf", "rate must be finite"),
        ("[arrivals]\nkind = 'closed'\nrate = 3", r"\[arrivals\] has no key rate"),
        ("[arrivals]\nkind = 'trace'", r"kind is trace, but there is no \[trace\]"),
        ("[trace]\nspeed = 2", r"\[trace\] file is missing"),
        ("[trace]\nfile = 'gone.csv'", "gone.csv cannot be read"),
        ("[work]\ninput = 'long'", "input must be a whole number or a table with a kind"),
        ("[work]\ninput = { min = 3, max = 2 }", "max is below min: 2 < 3"),
        ("[work]\ninput = { kind = 'lognormal', median = 3 }", r"\[work\] input sigma is missing"),
        ("[work]\nlanguages = ['tlh']", "has no words of tlh"),
        ("[work]\nkind = 'prompts'", "file is missing"),
        ("[[part]]\nweight = 1", r"\[\[part\]\] 1 name is missing"),
        ("[[part]]\nname = 'a'\nweight = 0", r"\[\[part\]\] a weight must be above 0"),
        ("[work]\n[[part]]\nname = 'a'", r"both \[work\] and \[\[part\]\]"),
        ("limits = ['ttft_ms_p99']", "is not a limit such as"),
        ("limits = ['ttfb_ms_p99 < 3']", "there is no figure ttfb_ms_p99; did you mean ttft_ms_p99"),
        ("work = 3", r"\[work\] must be a table"),
        ("x = ", "cannot be read"),
    ],
)
def test_a_bad_scenario_is_named_with_its_key(tmp_path, text, complaint):
    """What is wrong is said with the table and the key, and what was probably meant."""
    with pytest.raises(UsageError, match=complaint):
        build(written(tmp_path, text))


def test_an_unknown_scenario_is_answered_with_the_library():
    """Whoever mistypes a name sees which there are."""
    with pytest.raises(UsageError, match=r"there is no scenario chatt: the library has agent, .*trace"):
        scenario.load("chatt")


def test_the_readmes_format_is_the_format(tmp_path):
    """The commented file in the README makes a run, and every key that there is stands in it."""
    readme = (scenario.LIBRARY.parent / "README.md").read_text()
    text = readme.partition("```toml\n")[2].partition("```")[0]
    (tmp_path / "sample_azure.csv").write_text((scenario.LIBRARY / "sample_azure.csv").read_text())

    options = build(written(tmp_path, text))

    assert options.name == "mine"
    assert options.unmeasured_parts == {"hostile"}
    source = (scenario.LIBRARY.parent / "scenario.py").read_text()
    keys = set(re.findall(r'\.(?:count|number|text|flag|texts|mapping|choice|needed)\(\s*"(\w+)"', source))
    assert {key for key in keys if not re.search(rf"\b{key}\b", text)} == set()
