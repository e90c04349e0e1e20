"""From a scripted device to the wire: text, stop strings, logprobs, usage and last events, streamed and plain."""

import asyncio
from typing import Any

import pytest
from whole_builders import (
    CHAT,
    TEXT,
    Answer,
    ByteTokenizer,
    PieceTokenizer,
    ScriptedRunner,
    chat,
    completion,
    says,
    whole,
)
from wire_builders import http

FULL, EMOJI = "\ufffd", "🙂".encode()

TEXTS: dict[str, tuple[list[str | bytes], str]] = {
    "an emoji in two halves": ([EMOJI[:2], EMOJI[2:]], "🙂"),
    "letters split in two": ([b"d", b"\xc4", b"\x9b", b"d", b"\xc3", b"\xad \xc4", b"\x8f"], "dědí ď"),
    "an emoji before a space": (["ob ", EMOJI[:2], EMOJI[2:], " ke"], "ob 🙂 ke"),
    "a space breaks a character": ([b"\xe2", " ", b"\x82\xac"], f"{FULL} {FULL}{FULL}"),
    "a real replacement character": (["a", FULL], f"a{FULL}"),
    "half a character at the end": (["a", EMOJI[:2]], f"a{FULL}"),
    "spaces between words": ([" Hello", " world", "!"], " Hello world!"),
    "line separators": (["a\u2028b\u2029c\x85d\0e"], "a\u2028b\u2029c\x85d\0e"),
    "bytes that are no text": ([b"\xff", b"\xfe", b"\xc0", b"\x80", b"\xf5"] * 40, FULL * 200),
}

STOPS: dict[str, tuple[list[str | bytes], list[str], str]] = {
    "over several tokens": (["ABC", "DEF", "GHI", "JKL"], ["DEFGHIJ"], "ABC"),
    "with a line feed": (["fine.", "\nUser", ":"], ["\nUser:"], "fine."),
    "with tokens behind it": (["one, ", "two, ", "three, ", "four"], ["two"], "one, "),
    "in many pieces": (["ok", "<", "/", "e", "nd", ">"], ["</end>"], "ok"),
    "that never completes": (["ok", "<", "/x"], ["</end>"], "ok</x"),
    "the first to complete, not to be listed": (["xxSTOP1yySTOP2"], ["STOP2", "STOP1"], "xx"),
    "inside one token": (["hel", "lo wor"], ["o w"], "hell"),
    "two in one token": (["yellow"], ["low", "ell"], "y"),
    "behind held text": (["ok", "?", "\n"], ["?!", "\n"], "ok?"),
    "in a character's halves": (["a", EMOJI[:2], EMOJI[2:], "b"], ["🙂"], "a"),
}


async def answers_of(pieces: list[str | bytes], **wanted: Any) -> tuple[Answer, Answer]:
    """What the device says, once streamed and once plain, with further steps in flight."""
    tokenizer = PieceTokenizer(*pieces)
    runner = ScriptedRunner(says(*tokenizer.ids), vocab_size=tokenizer.vocab_size, num_blocks=64)
    async with whole(runner, tokenizer=tokenizer, policy="eager") as stack:
        wanted = {"max_tokens": len(pieces), **wanted}
        streamed = await stack.complete(stream=True, stream_options={"include_usage": True}, **wanted)
        plain = await stack.complete(**wanted)
    return streamed, plain


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("ends_in", ["length", "stop"])
async def test_a_stream_says_what_the_plain_answer_says(name: str, ends_in: str) -> None:
    """I5: joined deltas, plain text and the bytes decoded at once are equal, whichever way it ends."""
    pieces, expected = TEXTS[name]
    streamed, plain = await answers_of(pieces, max_tokens=len(pieces) + (ends_in == "stop"))

    assert (streamed.text, plain.text) == (expected, expected)
    assert (streamed.finish, plain.finish) == (ends_in, ends_in)
    assert streamed.events[-1]["usage"]["completion_tokens"] == plain.json["usage"]["completion_tokens"]
    if FULL not in expected:
        assert all(FULL not in choice["text"] for choice in streamed.choices)


@pytest.mark.parametrize("name", STOPS)
@pytest.mark.parametrize("logprobs", [None, 1])
async def test_no_part_of_a_stop_string_is_sent(name: str, logprobs: int | None) -> None:
    """The text ends before the match; tokens, logprobs and usage end with the token that completed it."""
    pieces, stop, expected = STOPS[name]
    streamed, plain = await answers_of([*pieces, "more", "and more"], stop=stop, logprobs=logprobs)
    if name == "that never completes":
        expected += "moreand more"

    assert (streamed.text, plain.text) == (expected, expected)
    assert plain.choices[0]["stop_reason"] in (*stop, None)
    if logprobs is not None:
        usage = plain.json["usage"]
        sent = [token for choice in streamed.choices if choice["logprobs"] for token in choice["logprobs"]["tokens"]]
        assert sent == plain.choices[0]["logprobs"]["tokens"]
        assert len(sent) == usage["completion_tokens"] == streamed.events[-1]["usage"]["completion_tokens"]


@pytest.mark.parametrize(("logprobs", "num_top"), [(0, 0), (2, 2), (20, 20)])
async def test_every_token_has_its_logprob(logprobs: int, num_top: int) -> None:
    """Half characters included; zero alternatives are not none at all; a stop id that is no text counts too."""
    streamed, plain = await answers_of(["a", EMOJI[:2], EMOJI[2:], "b"], logprobs=logprobs, max_tokens=9)
    entries = plain.choices[0]["logprobs"]

    assert plain.json["usage"]["completion_tokens"] == len(entries["tokens"]) == len(entries["token_logprobs"]) == 5
    assert all(len(top) in (num_top, 1) for top in entries["top_logprobs"] or [])
    joined = [value for each in streamed.choices if each["logprobs"] for value in each["logprobs"]["token_logprobs"]]
    assert joined == entries["token_logprobs"]


async def test_a_client_s_stop_id_has_a_logprob_and_no_text() -> None:
    """stop_token_ids: the token is counted, and its text is left out."""
    tokenizer = PieceTokenizer("a", "b", "c")
    streamed, plain = await answers_of(["a", "b", "c"], stop_token_ids=tokenizer.ids[1:2], logprobs=1)

    assert (streamed.text, plain.text, plain.finish) == ("a", "a", "stop")
    assert len(plain.choices[0]["logprobs"]["tokens"]) == plain.json["usage"]["completion_tokens"] == 2


async def test_ids_beyond_the_tokenizer_are_nothing_and_beyond_the_model_an_error() -> None:
    """A padded row of the vocabulary has no text; an id that no row has ends its own request and no other."""

    def script(context: Any, index: int) -> int:
        return [97, 270 if context[-1 - index] == ord("p") else 999, 98][index % 3]

    async with whole(ScriptedRunner(script, vocab_size=300, num_blocks=64)) as stack:
        padded = await stack.complete("p", max_tokens=3)
        beyond = await stack.complete("q", max_tokens=3)
        streamed = await stack.complete("q", max_tokens=3, stream=True)
        after = await stack.complete("p", max_tokens=1)

    assert (padded.status, padded.text, after.text) == (200, "ab", "a")
    assert (beyond.status, beyond.error["code"]) == (500, "generation_failed")
    assert (streamed.text, streamed.finish) == ("a", "generation_failed")


async def test_a_time_limit_is_not_a_length() -> None:
    """A 504 before the first token, an error event after it; never finish_reason length."""
    runner = ScriptedRunner(says("x", then=ord("x")), step_time_s=0.02, num_blocks=64)
    async with whole(runner) as stack:
        plain = await stack.complete(max_tokens=1000, timeout=0.1)
        streamed = await stack.complete(max_tokens=1000, timeout=0.1, stream=True)
        page = (await stack.get("/metrics")).body.decode()

        assert (plain.status, plain.error["code"]) == (504, "deadline_exceeded")
        assert 0 < len(streamed.text) < 100 and streamed.finish == "deadline_exceeded"
        assert stack.ends == {"timeout": 2}
        assert 'reason="timeout"} 2.0' in page


async def test_the_deadline_s_clock_starts_when_the_request_comes_in() -> None:
    """A body that takes its time has used up the time limit before it is queued."""
    async with whole() as stack:
        visitor = await stack.visit()
        sent = http("POST", TEXT, completion(timeout=0.05))
        visitor.writer.write(sent[:-1])
        await asyncio.sleep(0.06)  # the time that the test is about
        visitor.writer.write(sent[-1:])
        answer = await visitor.answer()

        assert (answer.status, answer.error["code"], stack.figures.num_accepted) == (504, "deadline_exceeded", 0)


async def test_a_request_without_tokens_still_ends() -> None:
    """End-of-sequence at once: a finish chunk, a reason, and a count."""
    async with whole(ScriptedRunner(says(), num_blocks=64)) as stack:
        streamed, plain = await stack.complete(stream=True), await stack.complete()
        echo = await stack.complete("abc", max_tokens=0, echo=True, logprobs=1)
        no_echo = await stack.complete("abc", max_tokens=0)

        assert (streamed.text, streamed.finish, plain.text, plain.finish) == ("", "stop", "", "stop")
        assert (echo.text, echo.finish, echo.json["usage"]["completion_tokens"]) == ("abc", "length", 0)
        assert len(echo.choices[0]["logprobs"]["token_logprobs"]) == echo.json["usage"]["prompt_tokens"]
        assert no_echo.status == 400


async def test_usage_is_counted_for_the_ones_that_leave() -> None:
    """A stream that ends has its usage in the last event; one that is cut has it in the log and the metrics."""
    async with whole(ScriptedRunner(says("x", then=ord("x")), step_time_s=0.001, num_blocks=64)) as stack:
        whole_stream = await stack.complete("abc", max_tokens=20, stream=True, stream_options={"include_usage": True})
        visitor = await stack.visit()
        visitor.post(TEXT, completion("abc", max_tokens=1000, stream=True))
        for _ in range(10):
            await visitor.reader.readuntil(b"\n\n")
        visitor.close()
        await stack.rest()
        cut = stack.lines("request.finished")[-1]

        usage = whole_stream.events[-1]["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (4, 20, 24)
        assert (cut["status"], cut["prompt_tokens"], cut["completion_tokens"] >= 10) == (499, 4, True)
        assert stack.figures.generation_tokens >= 20 + cut["completion_tokens"]


async def test_ignore_eos_does_not_stay_in_the_slot() -> None:
    """The next request in the same slot ends at its end-of-sequence."""
    async with whole(ScriptedRunner(says("ab"), max_num_seqs=1, num_blocks=64)) as stack:
        ignoring = await stack.complete(max_tokens=20, ignore_eos=True)
        obeying = await stack.complete(max_tokens=20)

    assert ignoring.json["usage"]["completion_tokens"] == 20
    assert (obeying.json["usage"]["completion_tokens"], obeying.finish) == (3, "stop")


async def test_readers_do_not_take_each_other_s_answers() -> None:
    """Thirty streams at once, each reads its own prompt's letter and only that."""

    def script(context: Any, index: int) -> int:
        return int(context[1])

    letters = [chr(65 + number) for number in range(30)]
    async with whole(ScriptedRunner(script, num_blocks=512)) as stack:
        answers = await asyncio.gather(*(stack.complete(each * 5, stream=True, max_tokens=40) for each in letters))

    assert [answer.text for answer in answers] == [each * 40 for each in letters]


async def test_the_extra_step_enters_no_cache() -> None:
    """What was launched beyond the last token is thrown away: no block that it completed is cached."""
    runner = ScriptedRunner(says("abcd"), block_size=4, num_blocks=64, max_num_seqs=4)
    async with whole(runner, policy="eager", max_num_batched_tokens=64) as stack:
        answer = await stack.complete([1, 2, 3], max_tokens=20)
        await stack.rest()

        # 3 + 4 letters have K/V; the end-of-sequence would be the eighth, and only an extra step writes it.
        assert (answer.text, stack.figures.num_blocks_cached) == ("abcd", 1)
        assert stack.figures.num_wasted_rows > 0


async def test_the_template_writes_bos_and_the_tokenizer_does_not() -> None:
    """A chat's prompt has exactly the BOS that its template prints."""
    async with whole(template="<|bos|>{% for message in messages %}{{ message.content }}{% endfor %}") as stack:
        tokens = (await stack.post("/tokenize", {"messages": chat()["messages"]})).json["tokens"]
        answer = await stack.post(CHAT, chat())

    assert tokens == [ByteTokenizer.BOS, *b"hi"]
    assert answer.json["usage"]["prompt_tokens"] == 3


async def test_a_template_s_own_refusal_is_a_400() -> None:
    """Roles that the template does not take, code that the sandbox does not: the client's fault, in a sentence."""
    wrong = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    async with whole() as stack:
        refused = await stack.post(CHAT, {"messages": wrong})
        client_s = [
            await stack.post(CHAT, chat(**field))
            for field in ({"chat_template": "{{ 1 }}"}, {"chat_template_kwargs": {"messages": []}})
        ]
    async with whole(template="{{ ''.__class__.__mro__[1].__subclasses__() }}") as stack:
        unsafe = await stack.post(CHAT, chat())

    assert (refused.status, "The system message comes first." in refused.error["message"]) == (400, True)
    assert [answer.status for answer in client_s] == [400, 400]
    assert unsafe.status == 400 and "class" not in unsafe.body.decode().replace("__class__", "")
