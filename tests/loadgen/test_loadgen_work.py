"""What is asked."""

import json

import pytest

from loadgen.errors import UsageError
from loadgen.work import BodyTemplate, RandomWords, read_jsonl


def template(**fields):
    return BodyTemplate(
        **({"model": "m", "endpoint": "chat", "max_tokens": 5, "temperature": 0.5, "extra": {}} | fields)
    )


def test_random_prompts_have_the_length_asked_for():
    """A prompt of n words has n words."""
    assert len(RandomWords(num_words=77).prompt(0, 0).text.split()) == 77


def test_random_prompts_repeat_by_seed_and_index():
    """Seed and index decide the words; another of either gives others from the first few words on."""
    words = RandomWords(num_words=32)

    assert words.prompt(3, 1) == words.prompt(3, 1)
    starts = {words.prompt(index, seed).text[:40] for index in range(20) for seed in range(20)}
    assert len(starts) == 400


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

    prompts = read_jsonl(str(file))

    assert prompts.prompt(0, 0).messages == ({"role": "user", "content": "Hello?"},)


def test_recorded_prompts_begin_again(tmp_path):
    """After the last line comes the first."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')

    prompts = read_jsonl(str(file))

    assert [prompts.prompt(index, 0).text for index in range(5)] == ["a", "b", "a", "b", "a"]


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
        read_jsonl(str(file))


def test_a_missing_prompt_file_is_a_usage_error(tmp_path):
    """A file that is not there is the user's fault, not a crash."""
    with pytest.raises(UsageError, match="cannot be read"):
        read_jsonl(str(tmp_path / "none"))


def test_chat_body():
    """A chat body holds messages and asks for a stream with usage."""
    prompt = RandomWords(num_words=3).prompt(0, 0)

    assert json.loads(template(ignore_eos=True).body(prompt)) == {
        "model": "m",
        "messages": [{"role": "user", "content": prompt.text}],
        "max_tokens": 5,
        "temperature": 0.5,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_completions_body():
    """A completions body holds the bare text."""
    prompt = RandomWords(num_words=3).prompt(0, 0)

    body = json.loads(template(endpoint="completions", usage="off").body(prompt))

    assert body == {"model": "m", "prompt": prompt.text, "max_tokens": 5, "temperature": 0.5, "stream": True}


def test_continuous_usage_is_asked_for():
    """Token counts in each event are an option of the stream."""
    body = json.loads(template(usage="continuous").body(RandomWords(num_words=1).prompt(0, 0)))

    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


def test_extra_fields_replace_ours():
    """What the user adds to the body wins."""
    body = json.loads(template(extra={"top_k": 1, "max_tokens": 9}).body(RandomWords(num_words=1).prompt(0, 0)))

    assert (body["top_k"], body["max_tokens"]) == (1, 9)
