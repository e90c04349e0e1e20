"""``python -m aserve chat``: a conversation in the terminal, with an engine in this process or with a running server.

The main thread belongs to the terminal: it waits for lines, prints, and takes Ctrl-C as KeyboardInterrupt. Replies come
from a ``Model``, which is one of two (``chat_models.py``).
"""

import contextlib
import os
import select
import signal
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol, TextIO

from aserve.cli.arguments import MODEL_SECTIONS, add_options, config_from
from aserve.errors import AserveError, ConfigError, ContextLengthExceeded

EXIT_FAILED: Final = 1

HELP: Final = """\
/reset          forget the conversation
/system [TEXT]  show or set the instructions, and forget the conversation
/help           this list
/exit           end (so does Ctrl-D)
Ctrl-C stops a reply. A line that ends in a backslash goes on in the next one; a pasted text stays whole.
"""

_HISTORY_LINES: Final = 1000
_PASTE_GAP_S: Final = 0.05
_NOT_PRINTABLE: Final = {code: "�" for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t"}
"""Control characters out of a model could move the cursor, name the window or write to the clipboard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What every reply is asked for with; None leaves it to the model's side."""

    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None


class Model(Protocol):
    """Who answers. about: a name for people. num_reply_tokens: of the newest reply, 0 where nobody counted."""

    about: str
    num_reply_tokens: int

    def reply(self, messages: list[dict[str, str]], sampling: Sampling) -> Generator[str]:
        """Pieces of the reply as they come; closing the iterator stops the reply. Raises AserveError."""
        ...


@dataclass(slots=True)
class Conversation:
    """The messages so far. ``system`` comes first in each request and survives ``reset``."""

    system: str = ""
    turns: list[dict[str, str]] = field(default_factory=list)

    def messages(self) -> list[dict[str, str]]:
        instructions = [{"role": "system", "content": self.system}] if self.system else []
        return instructions + self.turns

    def ask(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """End the open turn with the reply; an empty one takes its question along."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.turns.pop()

    def forget_oldest(self) -> bool:
        """Drop the oldest question and answer; False if only the open question is left."""
        if len(self.turns) < 3:
            return False
        del self.turns[:2]
        return True

    def reset(self) -> None:
        self.turns.clear()


def add_arguments(parser: ArgumentParser) -> None:
    """Declare where the model is, what replies are like, and the engine's options for one in this process."""
    group = parser.add_argument_group("chat")
    group.add_argument("--base-url", default="", metavar="URL", help="talk to this server in place of a model in here")
    group.add_argument("--api-key", default="", metavar="KEY", help="the server's key (or OPENAI_API_KEY)")
    group.add_argument("--system", default="", metavar="TEXT", help="instructions for the model")
    group.add_argument("--max-tokens", type=int, metavar="N", help="longest reply; by default what fits the context")
    group.add_argument("--temperature", type=float, metavar="T", help="0 always takes the likeliest token")
    group.add_argument("--seed", type=int, metavar="N", help="makes replies repeatable")
    group.add_argument("--no-history", action="store_true", help="keep no file of what was typed")
    add_options(parser, MODEL_SECTIONS)


def run(args: Namespace) -> int:
    """Talk until the end of input. 0; 1 if a piped prompt got no answer. Raises ConfigError and ModelError."""
    sampling = Sampling(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
    conversation = Conversation(system=args.system)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to end
    is_piped = not sys.stdin.isatty()
    prompt = sys.stdin.buffer.read().decode("utf-8", "replace").strip() if is_piped else ""
    if is_piped and not prompt:
        raise ConfigError("There is nothing to answer: the standard input is empty.")
    with _open_model(args) as model:
        if is_piped:
            return answer_once(model, conversation, sampling, prompt, sys.stdout)
        # A shell has what it starts in the background ignore Ctrl-C; whoever talks here has a terminal and means it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with line_editing(keeps_history=not args.no_history) as read_line:
            Terminal(model, conversation, sampling, read_line=read_line, out=sys.stdout).run()
    return 0


def _open_model(args: Namespace) -> contextlib.AbstractContextManager[Model]:
    from aserve.cli import chat_models  # the engine's layers, which --help does without

    if args.base_url:
        key = args.api_key or os.environ.get("OPENAI_API_KEY", "")
        return chat_models.open_server(args.base_url, api_key=key, model=_server_model(args))
    return chat_models.open_engine(config_from(args, os.environ))


def _server_model(args: Namespace) -> str:
    """The model named for a server, "" if none is. Options of an engine are refused: the server has its own."""
    names = [each.text for each in args.assignments if each.name == "model.model"]
    others = [each.origin for each in args.assignments if each.name != "model.model"]
    others += [flag for flag, value in (("--set", args.set), ("--profile", args.profile)) if value]
    if others:
        raise ConfigError(f"{others[0]} is for a model in this process; with --base-url the server has its own.")
    return args.model or next(reversed(names), "")


def answer_once(model: Model, conversation: Conversation, sampling: Sampling, prompt: str, out: TextIO) -> int:
    """One prompt in, one answer out, and nothing else on standard output. The exit code."""
    conversation.ask(prompt)
    try:
        with contextlib.closing(model.reply(conversation.messages(), sampling)) as pieces:
            for piece in pieces:
                out.write(piece)
                out.flush()
        out.write("\n")
        out.flush()
    except BrokenPipeError:  # the reader has seen enough; Python would complain once more while it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except AserveError as error:
        sys.stderr.write(f"aserve: {error.message}\n")
        return EXIT_FAILED
    return 0


class Terminal:
    """Reads lines, knows the commands, prints replies. ``read_line(prompt)`` is ``input`` or does as it does."""

    def __init__(
        self,
        model: Model,
        conversation: Conversation,
        sampling: Sampling,
        *,
        read_line: Callable[[str], str],
        out: TextIO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._conversation = conversation
        self._sampling = sampling
        self._read_line = read_line
        self._out = out
        self._clock = clock
        self._is_coloured = out.isatty() and not os.environ.get("NO_COLOR")

    def run(self) -> None:
        """Until /exit or the end of input."""
        self._say(f"{self._model.about}. /help lists the commands, Ctrl-D ends.")
        while True:
            try:
                text = self._read()
                if not text.strip():
                    continue
                if text.startswith("/") and not text.startswith("//"):
                    if self._command(text.strip()):
                        return
                else:
                    self._reply(text)
            except EOFError:
                self._out.write("\n")
                return
            except KeyboardInterrupt:  # at the prompt: what was typed is dropped, as in a shell
                self._out.write("\n")
                self._say("/exit or Ctrl-D ends.")

    def _read(self) -> str:
        text = self._read_line(self._prompt("> "))
        while text.endswith("\\"):
            text = text[:-1] + "\n" + self._read_line(self._prompt(". "))
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")

    def _command(self, text: str) -> bool:
        """Carry out a command; True ends the program."""
        name, _, rest = text.partition(" ")
        match name:
            case "/exit" | "/quit":
                return True
            case "/help":
                self._say(HELP.rstrip())
            case "/reset":
                self._conversation.reset()
                self._say("The conversation begins anew.")
            case "/system" if rest.strip():
                self._conversation.system = rest.strip()
                self._conversation.reset()
                self._say("The instructions are set, and the conversation begins anew.")
            case "/system":
                self._say(self._conversation.system or "There are no instructions.")
            case _:
                self._say(f"There is no command {name}; /help lists them. A text that begins with / is sent as //.")
        return False

    def _reply(self, text: str) -> None:
        """Ask, print what comes, remember what came: of a reply that was stopped or failed, the part that was said."""
        self._conversation.ask(text.removeprefix("/") if text.startswith("//") else text)
        said: list[str] = []
        notes: list[str] = []
        began_s = self._clock()
        try:
            try:
                self._print_reply(said, notes)
                notes.append(self._speed(self._clock() - began_s))
            except KeyboardInterrupt:
                notes.append("stopped")
        except AserveError as error:
            self._out.write("\n" if said else "")
            self._say(error.message, is_error=True)
        finally:
            self._conversation.answer("".join(said))
        if notes:
            self._out.write("\n")
            self._say(f"({'; '.join(notes)})")

    def _print_reply(self, said: list[str], notes: list[str]) -> None:
        """Where the conversation no longer fits the context, its oldest turns are forgotten."""
        conversation = self._conversation
        while True:
            try:
                with contextlib.closing(self._model.reply(conversation.messages(), self._sampling)) as reply:
                    for piece in reply:
                        said.append(piece)
                        self._out.write(piece.translate(_NOT_PRINTABLE))
                        self._out.flush()
                return
            except ContextLengthExceeded:
                if said or not conversation.forget_oldest():
                    raise
                notes[:] = ["the oldest turns no longer fit and were forgotten"]

    def _speed(self, seconds: float) -> str:
        count = self._model.num_reply_tokens
        return (
            f"{count} tokens in {seconds:.1f} s, {count / max(seconds, 1e-9):.0f} a second"
            if count
            else f"{seconds:.1f} s"
        )

    def _prompt(self, text: str) -> str:
        # \001 and \002 tell readline which characters take no room.
        return f"\001\033[1m\002{text}\001\033[0m\002" if self._is_coloured else text

    def _say(self, text: str, *, is_error: bool = False) -> None:
        colour = "\033[31m" if is_error else "\033[2m"
        self._out.write(f"{colour}{text}\033[0m\n" if self._is_coloured else f"{text}\n")
        self._out.flush()


@contextlib.contextmanager
def line_editing(*, keeps_history: bool) -> Iterator[Callable[[str], str]]:
    """What reads a line, with editing and with what was typed before, where Python has readline."""
    try:
        import readline
    except ImportError:  # some builds of Python
        yield read_pasted
        return
    has_bracketed_paste = "libedit" not in (readline.__doc__ or "")
    if has_bracketed_paste:
        readline.parse_and_bind("set enable-bracketed-paste on")  # which Python turns off for its own prompt
    path = _history_file()
    if keeps_history:
        with contextlib.suppress(OSError):
            readline.read_history_file(path)
    try:
        yield input if has_bracketed_paste else read_pasted
    finally:
        if keeps_history:
            with contextlib.suppress(OSError):  # a home that cannot be written to is no reason to fail
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch(mode=0o600)
                readline.set_history_length(_HISTORY_LINES)
                readline.write_history_file(path)


def read_pasted(prompt: str) -> str:
    """``input``, and the lines that arrive together with the first: nobody types that fast."""
    lines = [input(prompt)]
    with contextlib.suppress(EOFError):
        while select.select([sys.stdin], [], [], _PASTE_GAP_S)[0]:
            lines.append(input())
    return "\n".join(lines)


def _history_file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(os.path.expanduser(state)) / "aserve" / "chat_history"
