"""What is asked."""

import json
import random
from collections import Counter
from statistics import fmean, median

import pytest

from loadgen.errors import UsageError
from loadgen.lengths import Calibration, Fixed, Listed, LogNormal, Uniform
from loadgen.traces import read_trace
from loadgen.words import POOLS
from loadgen.work import (
    Ask,
    BodyTemplate,
    Mixture,
    RandomWords,
    Shaped,
    SharedPrefixes,
    TracePrompts,
    read_jsonl,
)


def words(count):
    """Random prompts of a length."""
    return RandomWords(lengths=Fixed(value=count))


def template(**fields):
    return BodyTemplate(**({"model": "m", "endpoint": "chat", "max_tokens": 5, "temperature": 0.5} | fields))


def hello():
    return Ask(messages=({"role": "user", "content": "Hello?"},))


def test_random_prompts_have_the_length_asked_for():
    """A prompt of n words has n words."""
    assert len(words(77).ask(0, 0, 0).text.split()) == 77


def test_random_prompts_repeat_by_seed_index_and_turn():
    """Seed, index and turn decide the words; another of either gives others from the first few words on."""
    source = words(32)

    assert source.ask(3, 0, 1) == source.ask(3, 0, 1)
    starts = {source.ask(i, turn, seed).text[:40] for i in range(10) for turn in range(4) for seed in range(10)}
    assert len(starts) == 400


@pytest.mark.parametrize("law", [Uniform(min=10, max=30), LogNormal(median=20, sigma=0.5, min=1, max=10_000)])
def test_lengths_follow_their_law(law):
    """The middle is where it should be, and nothing is outside of the bounds."""
    rng = random.Random(1)

    drawn = [law.draw(rng) for _ in range(20_000)]

    assert median(drawn) == pytest.approx(20, abs=1)
    assert min(drawn) >= law.min and max(drawn) <= law.max


def test_uniform_lengths_are_alike():
    """Each length comes as often as the others, within five standard deviations."""
    rng = random.Random(1)

    counts = Counter(Uniform(min=3, max=6).draw(rng) for _ in range(10_000))

    assert set(counts) == {3, 4, 5, 6}
    assert all(abs(count - 2500) < 5 * (2500 * 0.75) ** 0.5 for count in counts.values())


def test_listed_lengths_are_of_the_list():
    """Only what is in the list is drawn."""
    rng = random.Random(1)

    assert {Listed(values=[5, 5, 80]).draw(rng) for _ in range(100)} == {5, 80}


def test_lengths_in_tokens_become_words_by_the_calibration():
    """A prompt of 100 tokens, of which the template takes 20 and a word takes 2, has 40 words."""
    calibration = Calibration(tokens_per_word=2.0, overhead_tokens=20)
    source = RandomWords(lengths=Fixed(value=100), calibrations=(calibration,))

    assert len(source.ask(0, 0, 0).text.split()) == 40
    assert len(source.ask(0, 1, 0).text.split()) == 50


def test_languages_are_mixed():
    """Each prompt is of one of the languages, and all of them come."""
    source = RandomWords(lengths=Fixed(value=5), languages=("zh", "emoji"), calibrations=(Calibration(), Calibration()))

    prompts = [set(source.ask(index, 0, 0).text.split(" ")) for index in range(40)]

    assert all(prompt <= set(POOLS["zh"]) or prompt <= set(POOLS["emoji"]) for prompt in prompts)
    assert sum(prompt <= set(POOLS["zh"]) for prompt in prompts) in range(8, 33)


def test_prefixes_are_shared_within_their_group():
    """Equal groups begin alike, other groups do not, and no two prompts end alike; popular groups come oftener."""
    source = SharedPrefixes(num_groups=4, zipf=1.0, prefix=Fixed(value=30), lengths=Fixed(value=9))

    asks = [source.ask(index, 0, 0) for index in range(2000)]

    counts = Counter(ask.messages[0]["content"] for ask in asks).most_common()
    assert {ask.messages[0]["role"] for ask in asks} == {"system"}
    assert len({ask.messages[1]["content"] for ask in asks}) == 2000
    assert [count for _, count in counts] == pytest.approx([960, 480, 320, 240], abs=110)


@pytest.mark.parametrize(
    "line",
    [
        {"turns": ["Hello?", "And then?"]},
        {"prompt": "Hello?"},
        {"question": "Hello?", "answer": "42"},
        {"messages": [{"role": "user", "content": "Hello?"}]},
    ],
    ids=lambda line: next(iter(line)),
)
def test_recorded_prompts_are_read(tmp_path, line):
    """Each of the known shapes gives the same question."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(line) + "\n\n")

    assert read_jsonl(file).ask(0, 0, 0) == hello()


def test_recorded_turns_are_played_as_far_as_wanted(tmp_path):
    """A conversation has the turns of its line, at most so many as are asked for."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["a", "b", "c"]}\n{"prompt": "d"}\n')

    source = read_jsonl(file, num_turns_max=2)

    assert [source.num_turns(index, 0) for index in range(3)] == [2, 1, 2]
    assert [source.ask(0, turn, 0).text for turn in range(2)] == ["a", "b"]


def test_recorded_prompts_begin_again(tmp_path):
    """After the last line comes the first."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')

    prompts = read_jsonl(file)

    assert [prompts.ask(index, 0, 0).text for index in range(5)] == ["a", "b", "a", "b", "a"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"prompt": "a"}\n{"prompt": 3}\n', "jsonl:2 has none of"),
        ('{"turns": []}', "jsonl:1 has none of"),
        ("{", "jsonl:1 is not JSON"),
        ("\n", "holds no prompts"),
        (b"\xff", "cannot be read"),
    ],
)
def test_a_bad_prompt_file_is_named_with_its_line(tmp_path, text, complaint):
    """What is wrong with a file is said with its line."""
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())

    with pytest.raises(UsageError, match=complaint):
        read_jsonl(file)


def test_a_missing_prompt_file_is_a_usage_error(tmp_path):
    """A file that is not there is the user's fault, not a crash."""
    with pytest.raises(UsageError, match="cannot be read"):
        read_jsonl(tmp_path / "none")


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:47.1805900,20,9
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 1200, "output_length": 7, "hash_ids": [0, 1, 2]}
{"timestamp": 3000, "input_length": 1100, "output_length": 9, "hash_ids": [0, 1, 5]}
"""


def test_an_azure_trace_is_read(tmp_path):
    """Times count from the first request, to the digits that the trace has."""
    file = tmp_path / "trace.csv"
    file.write_text(AZURE)

    trace = read_trace(file, "azure", speed=2)

    assert trace.due_s.tolist() == pytest.approx([0, 0.25], abs=1e-6)
    assert (trace.input_tokens.tolist(), trace.output_tokens.tolist()) == ([374, 20], [44, 9])


def test_a_mooncake_trace_shares_its_blocks(tmp_path):
    """Equal blocks are equal words, unequal ones are not, and each prompt has its length."""
    file = tmp_path / "trace.jsonl"
    file.write_text(MOONCAKE)

    source = TracePrompts(trace=read_trace(file, "mooncake"))
    first, second = (source.ask(index, 0, 0).text.split() for index in range(2))

    assert (len(first), len(second)) == (1200, 1100)
    assert first[:1024] == second[:1024]
    assert first[1024:1044] != second[1024:1044]
    assert source.ask(1, 0, 0).max_tokens == 9


def test_a_scaled_trace_keeps_what_is_shared(tmp_path):
    """At a tenth of all lengths the first two blocks are still shared, and what is too long is cut at its end."""
    file = tmp_path / "trace.jsonl"
    file.write_text(MOONCAKE)

    source = TracePrompts(trace=read_trace(file, "mooncake"), scale=0.1, input_max=115)
    first, second = (source.ask(index, 0, 0).text.split() for index in range(2))

    assert (len(first), len(second)) == (115, 110)
    assert first[:102] == second[:102]


@pytest.mark.parametrize(
    ("form", "text", "complaint"),
    [
        ("azure", "a,b\n1,2\n", "lacks ContextTokens, GeneratedTokens, TIMESTAMP"),
        ("azure", AZURE + "yesterday,1,2\n", "csv:4 is not a request"),
        ("mooncake", MOONCAKE + "{}\n", "csv:3 is not a request"),
        ("mooncake", "\n", "holds no requests"),
    ],
)
def test_a_bad_trace_is_named_with_its_line(tmp_path, form, text, complaint):
    """What is wrong with a trace is said with its line."""
    file = tmp_path / "trace.csv"
    file.write_text(text)

    with pytest.raises(UsageError, match=complaint):
        read_trace(file, form)


def test_a_mixture_draws_its_parts_by_weight():
    """Of weights 3 and 1, a quarter is of the second; equal arguments give the same part."""
    source = Mixture(parts=((3.0, Shaped(source=words(1), part="a")), (1.0, Shaped(source=words(1), part="b"))))

    parts = [source.ask(index, 0, 0).part for index in range(2000)]

    assert parts.count("b") == pytest.approx(500, abs=100)
    assert parts == [source.ask(index, 0, 0).part for index in range(2000)]


def test_a_shape_lays_over_its_source():
    """Turns, times to think, lengths of answers and a system message are drawn for each arrival."""
    source = Shaped(
        source=words(3),
        system="Be brief.",
        turns=Uniform(min=1, max=3),
        think_ms=Uniform(min=100, max=300),
        output=Fixed(value=9),
    )

    asks = [source.ask(index, 0, 0) for index in range(300)]

    assert {source.num_turns(index, 0) for index in range(50)} == {1, 2, 3}
    assert fmean(ask.think_s for ask in asks) == pytest.approx(0.2, abs=0.02)
    assert {ask.max_tokens for ask in asks} == {9}
    assert [m["role"] for m in asks[0].messages] == ["system", "user"]
    assert [m["role"] for m in source.ask(0, 1, 0).messages] == ["user"]


def test_chat_body():
    """A chat body holds messages and asks for a stream with usage."""
    assert json.loads(template(ignore_eos=True).body(hello())) == {
        "model": "m",
        "messages": [{"role": "user", "content": "Hello?"}],
        "max_tokens": 5,
        "temperature": 0.5,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_completions_body():
    """A completions body holds the bare text."""
    body = json.loads(template(endpoint="completions", usage="off").body(hello()))

    assert body == {"model": "m", "prompt": "Hello?", "max_tokens": 5, "temperature": 0.5, "stream": True}


def test_responses_bodies():
    """A Responses body has its own names; on the websocket it has a type and no stream."""
    fields = {"model": "m", "input": [{"role": "user", "content": "Hello?"}], "max_output_tokens": 5}

    assert json.loads(template(endpoint="responses", temperature=None).body(hello())) == fields | {"stream": True}
    assert json.loads(template(endpoint="responses-ws", temperature=None).body(hello())) == fields | {
        "type": "response.create"
    }


def test_a_body_has_the_conversation_before_its_turn():
    """What was said before comes first."""
    before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

    assert json.loads(template().body(hello(), before))["messages"] == [*before, {"role": "user", "content": "Hello?"}]


def test_continuous_usage_is_asked_for():
    """Token counts in each event are an option of the stream."""
    body = json.loads(template(usage="continuous").body(hello()))

    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


def test_extra_fields_replace_ours():
    """What the user adds to the body wins, the turn's over the run's."""
    ask = Ask(messages=hello().messages, max_tokens=7, extra={"top_k": 2})

    body = json.loads(template(extra={"top_k": 1, "seed": 9}).body(ask))

    assert (body["top_k"], body["seed"], body["max_tokens"]) == (2, 9, 7)


def test_a_raw_body_is_sent_as_it_is():
    """What is no JSON can be sent too."""
    assert template().body(Ask(messages=(), raw_body='{"a')) == b'{"a'
