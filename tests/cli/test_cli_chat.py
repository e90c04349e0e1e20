"""The chat in the terminal: commands, history, Ctrl-C, pipes, and both kinds of models behind it."""

import contextlib
import io
import os
import pty
import re
import readline
import select
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from cli_builders import StubServer, stub_server

from aserve.__main__ import main
from aserve.cli.chat import Conversation, Sampling, Terminal
from aserve.cli.chat_models import EngineModel, LoopThread, ServerModel
from aserve.embedding import Engine
from aserve.errors import AserveError, ConfigError, ContextLengthExceeded, ModelError
from aserve.testing import ByteTokenizer, ScriptedRunner
from aserve.text.chat_template import ChatTemplate

ROOT = Path(__file__).parents[2]
HAS_BRACKETED_PASTE = "libedit" not in (readline.__doc__ or "")
Event = str | BaseException


class ScriptedModel:
    """Gives one list of events a reply: texts, and exceptions that it raises."""

    def __init__(self, *replies: list[Event]) -> None:
        self.about = "scripted"
        self.num_reply_tokens = 0
        self.asked: list[list[dict[str, str]]] = []
        self.num_closed = 0
        self._replies = list(replies)

    def reply(self, messages: list[dict[str, str]], sampling: Sampling) -> Generator[str]:
        self.asked.append([dict(message) for message in messages])
        try:
            for event in self._replies.pop(0):
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            self.num_closed += 1


def talk(model: ScriptedModel, *lines: Event, system: str = "") -> tuple[str, Conversation]:
    """What the screen shows after these lines (an exception stands for a key), and the conversation."""
    waiting = list(lines)

    def read_line(prompt: str) -> str:
        if not waiting:
            raise EOFError
        line = waiting.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line

    out, conversation = io.StringIO(), Conversation(system=system)
    Terminal(model, conversation, Sampling(), read_line=read_line, out=out, clock=lambda: 0.0).run()
    return out.getvalue(), conversation


def contents(messages: list[dict[str, str]]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


def test_a_conversation_is_remembered() -> None:
    """Each request carries the instructions and all turns before it."""
    model = ScriptedModel(["one"], ["t", "wo"])
    screen, conversation = talk(model, "first", "second", system="Be brief.")

    assert contents(model.asked[1]) == [
        ("system", "Be brief."), ("user", "first"), ("assistant", "one"), ("user", "second"),
    ]  # fmt: skip
    assert contents(conversation.turns)[-1] == ("assistant", "two")
    assert "one\n(0.0 s)\ntwo\n" in screen


def test_ctrl_c_stops_the_reply_and_not_the_program() -> None:
    """What was said so far stays in the conversation, and the next line is answered."""
    model = ScriptedModel(["half", KeyboardInterrupt()], ["whole"])
    screen, conversation = talk(model, "a", "b")

    assert contents(conversation.turns) == [("user", "a"), ("assistant", "half"), ("user", "b"), ("assistant", "whole")]
    assert "half\n(stopped)\n" in screen
    assert model.num_closed == 2


def test_ctrl_c_before_the_first_piece_takes_the_question_back() -> None:
    """A question without a reply is not in the conversation."""
    _, conversation = talk(ScriptedModel([KeyboardInterrupt()]), "a")

    assert conversation.turns == []


def test_ctrl_c_at_the_prompt_drops_the_line() -> None:
    """At the prompt it says how to end, and goes on."""
    screen, conversation = talk(ScriptedModel(["yes"]), KeyboardInterrupt(), "a")

    assert "/exit or Ctrl-D ends." in screen
    assert len(conversation.turns) == 2


def test_commands() -> None:
    """/reset forgets, /system sets and shows, // begins a text with a slash, others are told."""
    model = ScriptedModel(["1"], ["2"], ["3"])
    screen, _ = talk(model, "a", "/reset", "b", "/system Rhyme.", "/system", "//c", "/what", "/help", "/exit", "never")

    assert contents(model.asked[1]) == [("user", "b")]
    assert contents(model.asked[2]) == [("system", "Rhyme."), ("user", "/c")]
    assert "\nRhyme.\n" in screen
    assert "There is no command /what;" in screen
    assert "/reset          forget" in screen


def test_lines_that_go_on() -> None:
    """A backslash at the end joins the next line; blank lines are nothing."""
    model = ScriptedModel(["x"])
    talk(model, "", "  ", "one\\", "two")

    assert contents(model.asked[0]) == [("user", "one\ntwo")]


def test_a_full_context_forgets_the_oldest_turns() -> None:
    """When the conversation no longer fits, its oldest question and answer go, and the screen says so."""
    model = ScriptedModel(["1"], ["2"], [ContextLengthExceeded("full")], ["3"])
    screen, _ = talk(model, "a", "b", "c")

    assert contents(model.asked[3]) == [("user", "b"), ("assistant", "2"), ("user", "c")]
    assert "(the oldest turns no longer fit and were forgotten; 0.0 s)" in screen


def test_a_question_too_long_is_told() -> None:
    """If the question alone does not fit, the error is shown and the question dropped."""
    screen, conversation = talk(ScriptedModel([ContextLengthExceeded("The prompt has 9 tokens.")]), "a")

    assert "The prompt has 9 tokens." in screen
    assert conversation.turns == []


def test_an_error_in_the_middle_is_told() -> None:
    """An error is a line; what was said before it stays."""
    screen, conversation = talk(ScriptedModel(["so", AserveError("It broke.")]), "a")

    assert "so\nIt broke.\n" in screen
    assert contents(conversation.turns) == [("user", "a"), ("assistant", "so")]


def test_a_model_cannot_steer_the_terminal() -> None:
    """Control characters of a reply are not passed on, in the conversation they stay."""
    screen, conversation = talk(ScriptedModel(["a\x1b]52;c;x\x07\x9b31m\tb\nc"]), "a")

    assert "a�]52;c;x��31m\tb\nc" in screen
    assert "\x1b]52" in conversation.turns[1]["content"]


# --- an engine in this process


@pytest.fixture
def loop() -> Generator[LoopThread]:
    with LoopThread() as thread:
        yield thread


def scripted_engine(runner: ScriptedRunner) -> Engine:
    return Engine.from_runner(runner, ByteTokenizer(), template=ChatTemplate("{{ messages[-1].content }}"))


def statistics_of(engine: Engine) -> dict[str, int]:
    return engine.statistics().num_finished


def test_an_engine_streams_from_another_thread(loop: LoopThread) -> None:
    """Pieces come as they are made; the tokens are counted."""
    engine = scripted_engine(ScriptedRunner())
    loop.call(engine.__aenter__())
    model = EngineModel(engine, loop)
    pieces = list(model.reply([{"role": "user", "content": "x"}], Sampling(max_tokens=5)))
    loop.call(engine.aclose())

    assert "".join(pieces) == "ok ok"
    assert model.num_reply_tokens == 5


def test_a_reply_that_is_left_is_aborted(loop: LoopThread) -> None:
    """Closing the iterator ends the request in the engine."""
    engine = scripted_engine(ScriptedRunner())
    loop.call(engine.__aenter__())
    reply = EngineModel(engine, loop).reply([{"role": "user", "content": "x"}], Sampling())
    next(reply)
    reply.close()
    finished = statistics_of(engine)
    loop.call(engine.aclose())

    assert finished["abort"] == 1


def test_faults_come_through_the_loop_thread(loop: LoopThread) -> None:
    """What the loop raises is raised in the caller's thread."""
    engine = scripted_engine(ScriptedRunner(max_model_len=16))
    loop.call(engine.__aenter__())
    with pytest.raises(ContextLengthExceeded):
        list(EngineModel(engine, loop).reply([{"role": "user", "content": "x" * 20}], Sampling()))
    loop.call(engine.aclose())


# --- a server


@pytest.fixture
def stub() -> Generator[StubServer]:
    with stub_server() as server:
        yield server


def reply_of(stub: StubServer, *, url: str = "", key: str = "", sampling: Sampling | None = None) -> str:
    model = ServerModel(url or stub.url, api_key=key, model="")
    return "".join(model.reply([{"role": "user", "content": "Hi"}], sampling or Sampling()))


def test_a_server_is_asked_for_a_stream(stub: StubServer) -> None:
    """The server's first model, only the fields that were set, and the key."""
    assert reply_of(stub, key="sesame", sampling=Sampling(max_tokens=5)) == "Hello there."
    assert stub.headers["Authorization"] == "Bearer sesame"
    assert stub.bodies[0] == {
        "model": "stub-model",
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 5,
    }


@pytest.mark.parametrize("form", ["{}", "{}/", "{}/v1", "{}/v1/", "{bare}"])
def test_forms_of_the_address(stub: StubServer, form: str) -> None:
    """With /v1 or without it, with http:// or without it."""
    url = form.format(stub.url, bare=stub.url.removeprefix("http://"))

    assert reply_of(stub, url=url) == "Hello there."


@pytest.mark.parametrize(
    ("status", "body", "expected", "kind"),
    [
        (401, b'{"error": {"message": "Wrong key."}}', "Wrong key.", AserveError),
        (400, b'{"error": {"message": "Long.", "code": "context_length_exceeded"}}', "Long.", ContextLengthExceeded),
        (400, b'{"error": "plain"}', "plain", AserveError),
        (502, b"<html>", "The server answers with 502 Bad Gateway.", AserveError),
    ],
)
def test_a_server_that_refuses(
    stub: StubServer, status: int, body: bytes, expected: str, kind: type[AserveError]
) -> None:
    """The server's own sentence is passed on, whatever form its error has."""
    stub.error = (status, body)

    with pytest.raises(AserveError) as raised:
        reply_of(stub)
    assert (raised.value.message, type(raised.value)) == (expected, kind)


def test_a_stream_that_breaks_off_is_an_error(stub: StubServer) -> None:
    """An end without [DONE] is not taken for the end of the reply."""
    stub.is_broken_off = True

    with pytest.raises(AserveError, match="broke off"):
        reply_of(stub)


def test_leaving_a_reply_closes_its_connection(stub: StubServer) -> None:
    """That is how the server learns that nobody reads any more."""
    stub.hold = True
    reply = ServerModel(stub.url, api_key="", model="m").reply([{"role": "user", "content": "Hi"}], Sampling())
    assert next(reply) == "Hello"
    reply.close()

    assert stub.gone.wait(10)


@pytest.mark.parametrize(
    ("url", "kind", "message"),
    [
        ("ftp://x", ConfigError, "is no http or https address"),
        ("http://", ConfigError, "is no http or https address"),
        ("http://x:y", ConfigError, "has no valid port"),
        ("http://127.0.0.1:9", ModelError, "does not answer: Connection refused"),
    ],
)
def test_wrong_addresses(url: str, kind: type[AserveError], message: str) -> None:
    """What is no address, and an address where nobody is, are one sentence."""
    with pytest.raises(kind, match=re.escape(message)):
        ServerModel(url, api_key="", model="")


def test_options_of_an_engine_do_not_go_with_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    """A flag that would have no effect is refused."""
    stdin = sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(b"Hi"))
    try:
        assert main(["chat", "--base-url", "http://x", "--threads", "2"]) == 2
    finally:
        sys.stdin = stdin
    assert capsys.readouterr().err == (
        "aserve: --threads is for a model in this process; with --base-url the server has its own.\n"
    )


# --- as a process


def environment(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ASERVE_")}
    return kept | {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm", "NO_COLOR": "1"}


def piped(tmp_path: Path, url: str, text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aserve", "chat", "--base-url", url],
        input=text, env=environment(tmp_path), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_piped_one_prompt_in_one_answer_out(stub: StubServer, tmp_path: Path) -> None:
    """Nothing but the answer goes to standard output, and the whole input is one prompt."""
    result = piped(tmp_path, stub.url, "Hi\nthere\n")

    assert (result.returncode, result.stdout, result.stderr) == (0, "Hello there.\n", "")
    assert stub.bodies[0]["messages"] == [{"role": "user", "content": "Hi\nthere"}]


def test_piped_failures(stub: StubServer, tmp_path: Path) -> None:
    """No prompt is a mistake (2), no answer a failure (1); both are a sentence."""
    stub.error = (500, b'{"error": {"message": "Out of order."}}')

    empty, failed = piped(tmp_path, stub.url, " \n"), piped(tmp_path, stub.url, "Hi")

    assert (empty.returncode, empty.stderr) == (2, "aserve: There is nothing to answer: the standard input is empty.\n")
    assert (failed.returncode, failed.stderr) == (1, "aserve: Out of order.\n")


class Screen:
    """A pseudo terminal with the program in it."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._descriptor, slave = pty.openpty()
        # A process of its own takes the terminal: a preexec_fn is not safe beside the stub's threads.
        login = "import os, sys; os.login_tty(int(sys.argv[1])); os.execv(sys.argv[2], sys.argv[2:])"
        self.program = subprocess.Popen(
            [sys.executable, "-c", login, str(slave), *command], env=environment, pass_fds=[slave]
        )
        os.close(slave)
        self._unread = ""

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.program.kill()
        self.program.wait()
        os.close(self._descriptor)

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def interrupt_until(self, text: str) -> None:
        """Ctrl-C, and again where nothing comes of it, as a user does.

        A signal that arrives just before the program blocks in a system call is not seen until that call returns.
        """
        for _ in range(5):
            self.type("\x03")
            with contextlib.suppress(AssertionError):
                return self.wait_for(text, timeout_s=3)
        raise AssertionError(f"{text!r} does not come of Ctrl-C")

    def wait_for(self, text: str, timeout_s: float = 30) -> None:
        """Read until ``text`` has appeared, and forget what stands before its end."""
        end_s = time.monotonic() + timeout_s
        while text not in self._unread:
            ready, _, _ = select.select([self._descriptor], [], [], max(0.0, end_s - time.monotonic()))
            assert ready, f"{text!r} is not in {self._unread!r}"
            self._unread += os.read(self._descriptor, 4096).decode()
        self._unread = self._unread.partition(text)[2]


def test_in_a_terminal(stub: StubServer, tmp_path: Path) -> None:
    """Ctrl-C stops a reply, a paste stays whole, Ctrl-D ends with 0; what was typed is kept, for the owner only."""
    command = [sys.executable, "-m", "aserve", "chat", "--base-url", stub.url]
    with Screen(command, environment(tmp_path)) as screen:
        screen.wait_for("> ")
        stub.hold = True
        screen.type("wait\r")
        screen.wait_for("Hello")
        screen.type("\x03")
        screen.wait_for("(stopped)")
        assert stub.gone.wait(10)
        stub.hold = False
        screen.wait_for("> ")
        screen.type("\x1b[200~pasted\nlines\x1b[201~\r" if HAS_BRACKETED_PASTE else "pasted\rlines\r")
        screen.wait_for("(3 tokens in ")
        screen.wait_for("> ")
        screen.type("\x04")
        assert screen.program.wait(30) == 0

    assert stub.bodies[1]["messages"][-1]["content"] == "pasted\nlines"
    history = tmp_path / "aserve" / "chat_history"
    assert history.read_text().splitlines()[-3:] == ["wait", "pasted", "lines"]
    assert history.stat().st_mode & 0o077 == 0


def test_a_paste_without_readline(tmp_path: Path) -> None:
    """Lines that arrive together are one text where the terminal does not bracket them."""
    program = "from aserve.cli.chat import read_pasted; print(repr(read_pasted('? ')))"
    with Screen([sys.executable, "-c", program], environment(tmp_path)) as screen:
        screen.wait_for("? ")
        screen.type("one\ntwo\nthree\n")
        screen.wait_for(r"'one\ntwo\nthree'")
        assert screen.program.wait(30) == 0
