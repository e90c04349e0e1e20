"""Stop strings: nothing of one leaks, the first to complete cuts, and everything else comes out."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aserve.text.stops import StopMatcher


def stream(pieces: list[str], stops: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    """Every text that is released, the one at the end too, and the match."""
    matcher = StopMatcher(tuple(stops), include=include)
    released = [matcher.push(piece).text for piece in pieces]
    return [*released, matcher.finish()], matcher.matched


def reference(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """The whole-string rule: earliest end, then earliest start."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end if include else end - len(stop)], stop


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["ABC", "DEF", "GHI", "JKL"], ["DEFGHIJ"], "ABC"),
        (["fine.", "\nUser", ":"], ["\nUser:"], "fine."),
        (["one, ", "two, ", "three, ", "four"], ["two"], "one, "),
        (["ok", "<", "/", "e", "nd", ">"], ["</end>"], "ok"),
        (["ok", "<", "/x"], ["</end>"], "ok</x"),
        (["xxSTOP1yySTOP2"], ["STOP2", "STOP1"], "xx"),
        (["hel", "lo wor"], ["o w"], "hell"),
        (["yellow"], ["low", "ell"], "y"),
        (["ok", "?", "\n"], ["?!", "\n"], "ok?"),
        (["aab"], ["ab", "aab"], ""),
        (["ababac"], ["abac"], "ab"),
    ],
)
def test_the_text_ends_before_the_stop_that_completes_first(pieces: list[str], stops: list[str], expected: str) -> None:
    """The public cases of leaks, orders and tails, and overlaps of a stop with itself and with others."""
    released, _ = stream(pieces, stops)

    assert "".join(released) == expected


def test_held_text_is_the_longest_suffix_that_may_still_match() -> None:
    """Held is no more than needed: "x" cannot be part of the stop, the two characters behind it can."""
    assert StopMatcher(("ab!",)).push("xab") == ("x", None)


def test_an_included_stop_stays_and_nothing_follows_it() -> None:
    """include keeps the match itself, also when it began in an earlier piece."""
    released, matched = stream(["oneS", "TOPtwo", "three"], ["STOP"], include=True)

    assert (released, matched) == (["one", "STOP", "", ""], "STOP")


def test_pushes_after_a_match_repeat_the_match() -> None:
    """The overlap's extra steps may still arrive; they release nothing."""
    matcher = StopMatcher(("b",))
    matcher.push("ab")

    assert (matcher.push("cd"), matcher.finish()) == (("", "b"), "")


def test_without_stops_text_passes() -> None:
    """No stops: every piece is released as it is, nothing is ever held."""
    assert stream(["a", "", "b"], []) == (["a", "", "b", ""], None)


def test_an_empty_stop_is_refused() -> None:
    """It would match everywhere."""
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(("a", ""))


@pytest.mark.parametrize("stop", ["^]", "-", "\\", "[a-z]", "😀", "\n"])
def test_stops_are_text_and_not_patterns(stop: str) -> None:
    """Characters with a meaning in regular expressions stand for themselves."""
    assert stream(["abc", stop + "x"], [stop]) == (["abc", "", ""], stop)


@given(
    pieces=st.lists(st.text("abc", max_size=5), max_size=20),
    stops=st.lists(st.text("abc", min_size=1, max_size=6), max_size=5),
    include=st.booleans(),
)
def test_any_split_gives_what_the_whole_string_gives(pieces: list[str], stops: list[str], include: bool) -> None:
    """A small alphabet makes matches, overlaps and near misses common."""
    released, matched = stream(pieces, stops, include=include)

    assert ("".join(released), matched) == reference("".join(pieces), stops, include=include)


@given(pieces=st.lists(st.text("ab", max_size=4), max_size=30), stops=st.lists(st.text("ab", min_size=1), min_size=1))
def test_no_more_is_held_than_a_stop_less_one_character(pieces: list[str], stops: list[str]) -> None:
    """What was pushed and not released is always the beginning of some stop."""
    matcher, pushed, released = StopMatcher(tuple(stops)), "", ""
    for piece in pieces:
        pushed += piece
        result = matcher.push(piece)
        released += result.text
        if result.matched:
            break
        held = pushed.removeprefix(released)
        assert not held or any(len(held) < len(stop) and stop.startswith(held) for stop in stops)


def test_the_longest_lists_allowed_are_linear() -> None:
    """16 stops of 256 characters against 100,000 characters that nearly match: a quadratic matcher takes minutes."""
    stops = tuple("a" * 255 + chr(0x100 + index) for index in range(16))
    matcher = StopMatcher(stops)
    started = time.process_time()
    for _ in range(1000):
        matcher.push("a" * 100)

    assert (len(matcher.finish()), time.process_time() - started < 5) == (255, True)
