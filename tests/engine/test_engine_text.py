"""From tokens to text: what a stream carries."""

import numpy as np
import pytest
from engine_builders import end, read, request, running, text, tokens

from aserve.core.request import FinishReason
from aserve.testing import ByteTokenizer, ScriptedRunner


def script_of(*pieces: str | int):
    """A script that emits the bytes of each piece, or a token id as it is, and then end-of-sequence."""
    ids = [token for piece in pieces for token in (piece.encode() if isinstance(piece, str) else [piece])]
    return lambda context, index: ids[index] if index < len(ids) else ByteTokenizer.EOS


async def test_joined_deltas_are_the_decoded_tokens() -> None:
    """What a reader joins is what decoding all its tokens at once gives."""
    async with running(ScriptedRunner(script_of("naïve 🙂 text"))) as engine:
        deltas = await read(engine.submit_nowait(request(max_tokens=12)))

    assert text(deltas) == ByteTokenizer().decode(tokens(deltas))
    assert len(tokens(deltas)) == 12


async def test_the_token_limit_ends_in_length() -> None:
    """max_tokens tokens are delivered, not one more, and the reason is length."""
    async with running() as engine:
        deltas = await read(engine.submit_nowait(request(max_tokens=5)))

    assert (end(deltas).finish, end(deltas).num_output, len(tokens(deltas))) == (FinishReason.LENGTH, 5, 5)


async def test_end_of_sequence_counts_but_is_not_text() -> None:
    """EOS ends in stop without a stop_reason; it is among the tokens and not in the text."""
    async with running(ScriptedRunner(script_of("ab"))) as engine:
        stream = engine.submit_nowait(request())
        deltas = await read(stream)

    assert (text(deltas), end(deltas).finish, end(deltas).stop_reason) == ("ab", FinishReason.STOP, None)
    assert tokens(deltas) == [*b"ab", ByteTokenizer.EOS]
    assert stream.usage.completion_tokens == 3


async def test_ignore_eos_goes_on() -> None:
    """With ignore_eos the limit is what ends it."""
    async with running(ScriptedRunner(script_of("ab"))) as engine:
        deltas = await read(engine.submit_nowait(request(ignore_eos=True, max_tokens=6)))

    assert (end(deltas).finish, len(tokens(deltas))) == (FinishReason.LENGTH, 6)


async def test_a_stop_token_id_is_named_as_the_reason() -> None:
    """A client's own stop id ends in stop and is the stop_reason."""
    async with running(ScriptedRunner(script_of("abc"))) as engine:
        deltas = await read(engine.submit_nowait(request(stop_token_ids=(ord("b"),))))

    assert (text(deltas), end(deltas).stop_reason) == ("a", ord("b"))


async def test_stop_ids_wait_for_min_tokens() -> None:
    """No stop id ends a sequence that has fewer than min_tokens."""
    async with running(ScriptedRunner(script_of())) as engine:
        deltas = await read(engine.submit_nowait(request(min_tokens=4, max_tokens=20)))

    assert end(deltas).num_output == 5
    assert tokens(deltas)[-1] == ByteTokenizer.EOS


@pytest.mark.parametrize(
    ("pieces", "stop", "expected"),
    [
        (("ABC", "DEF", "GHI", "JKL"), "DEFGHIJ", "ABC"),
        (("fine.", "\nUser", ":"), "\nUser:", "fine."),
        (("one, ", "two, ", "three, ", "four"), "two", "one, "),
        (("ok", "<", "/", "e", "nd", ">"), "</end>", "ok"),
    ],
)
@pytest.mark.parametrize("policy", ["sync", "overlap", "eager"])
async def test_no_part_of_a_stop_string_leaks(pieces: tuple[str, ...], stop: str, expected: str, policy: str) -> None:
    """The text ends before the stop string, whatever further steps were launched meanwhile."""
    async with running(ScriptedRunner(script_of(*pieces)), policy=policy) as engine:
        stream = engine.submit_nowait(request(stop=(stop,), max_tokens=40))
        deltas = await read(stream)

    whole = "".join(pieces)
    assert (text(deltas), end(deltas).finish, end(deltas).stop_reason) == (expected, FinishReason.STOP, stop)
    # Usage, tokens and logprobs end with the token that completed the match; what ran beyond it is waste.
    assert stream.usage.completion_tokens == len(tokens(deltas)) == whole.index(stop) + len(stop)


async def test_held_text_is_released_at_another_end() -> None:
    """What might have become a stop string is text after all when the sequence ends otherwise."""
    async with running(ScriptedRunner(script_of("ok</x"))) as engine:
        deltas = await read(engine.submit_nowait(request(stop=("</xyz>",))))

    assert text(deltas) == "ok</x"


async def test_the_stop_string_is_kept_where_asked_for() -> None:
    """include_stop_str_in_output keeps the match and nothing behind it."""
    async with running(ScriptedRunner(script_of("one two three"))) as engine:
        deltas = await read(
            engine.submit_nowait(request(stop=("two",), include_stop_str_in_output=True, max_tokens=13))
        )

    assert text(deltas) == "one two"


@pytest.mark.parametrize("ending", [(), (ord("x"),)])
async def test_a_truncated_character_is_flushed_once(ending: tuple[int, ...]) -> None:
    """Half an emoji at the end becomes one replacement character, as decoding all tokens at once has it."""
    half = list("🙂".encode()[:2])
    async with running(ScriptedRunner(script_of("a", *half))) as engine:
        deltas = await read(engine.submit_nowait(request(max_tokens=3 if not ending else 9, stop_token_ids=ending)))

    assert text(deltas) == ByteTokenizer().decode([*b"a", *half])


async def test_tokens_travel_with_the_delta_that_carries_their_text() -> None:
    """Tokens of half a character are held with it, and every token has its logprob."""
    async with running(ScriptedRunner(script_of("a🙂b"))) as engine:
        deltas = await read(engine.submit_nowait(request(logprobs=2)))

    carried = [(delta.text, bytes(delta.tokens)) for delta in deltas if delta.text]
    assert carried == [("a", b"a"), ("🙂", "🙂".encode()), ("b", b"b")]
    assert [entry.token for delta in deltas for entry in delta.logprobs or ()] == tokens(deltas)
    assert all(len(entry.top) == 2 for delta in deltas for entry in delta.logprobs or ())


async def test_logprobs_of_zero_alternatives_are_not_none() -> None:
    """logprobs = 0 reports each chosen token alone."""
    async with running() as engine:
        deltas = await read(engine.submit_nowait(request(logprobs=0, max_tokens=3)))

    assert [entry.top for delta in deltas for entry in delta.logprobs or ()] == [(), (), ()]


async def test_prompt_logprobs_cover_the_prompt() -> None:
    """The first token has none, every other one has its own, whatever the chunks."""
    async with running(max_num_batched_tokens=272, max_num_seqs=256) as engine:
        deltas = await read(engine.submit_nowait(request("p" * 40, prompt_logprobs=1, max_tokens=2)))

    (entries,) = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
    assert entries[0] is None
    assert [entry.token for entry in entries[1:] if entry is not None] == [ord("p")] * 39


async def test_no_tokens_at_all_ends_in_length() -> None:
    """max_tokens = 0 computes the prompt and delivers nothing but the end."""
    async with running() as engine:
        deltas = await read(engine.submit_nowait(request(max_tokens=0, prompt_logprobs=0)))

    assert (tokens(deltas), text(deltas), end(deltas).finish) == ([], "", FinishReason.LENGTH)
    assert len(end(deltas).prompt_logprobs or ()) == len("hello")


async def test_each_choice_has_its_own_text_and_end() -> None:
    """Two prompts with two children each are choices 0 to 3, in order of prompts."""

    def script(context: np.ndarray, index: int) -> int:
        return int(context[0])

    async with running(ScriptedRunner(script)) as engine:
        stream = engine.submit_nowait(request(["aa", "bb"], n=2, max_tokens=3))
        deltas = await read(stream)

    assert [text(deltas, index) for index in range(4)] == ["aaa", "aaa", "bbb", "bbb"]
    assert [end(deltas, index).finish for index in range(4)] == [FinishReason.LENGTH] * 4
    assert (stream.usage.prompt_tokens, stream.usage.completion_tokens) == (4, 12)


async def test_a_second_call_takes_the_first_ones_prefix() -> None:
    """The cached tokens of a prompt are reported, in whole blocks and without its last token."""
    async with running() as engine:
        await read(engine.submit_nowait(request("x" * 64)))
        stream = engine.submit_nowait(request("x" * 64))
        await read(stream)

    assert stream.usage.cached_tokens == 48


async def test_first_tokens_beyond_a_slice_wait_their_turn_in_order() -> None:
    """More first tokens in one landing than a slice holds: each choice still has its tokens in order."""
    async with running(ScriptedRunner(b"abcdefgh"), fan_out_slice=2, policy="eager", max_inflight=8) as engine:
        streams = [engine.submit_nowait(request(max_tokens=8)) for _ in range(9)]
        texts = [text(await read(stream)) for stream in streams]

    assert texts == ["abcdefgh"] * 9
