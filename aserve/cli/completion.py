"""``python -m aserve completion SHELL``: a completion script, made from the same tables as the commands themselves."""

import sys
from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args, get_origin

from aserve.cli import parsers
from aserve.config import Option, options
from aserve.profiles import PROFILES

_HINTS: Final = {
    "bash": 'eval "$(aserve completion bash)", in ~/.bashrc',
    "zsh": 'eval "$(aserve completion zsh)" after compinit, in ~/.zshrc',
    "fish": "aserve completion fish > ~/.config/fish/completions/aserve.fish",
}
_HELP: Final = parsers.COMMANDS | parsers.SUBCOMMANDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """What a shell has to know of one flag. values: what may follow, if that is a list."""

    names: tuple[str, ...]
    help: str
    takes_value: bool
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandWords:
    """One command: its flags, and the words that its first argument may be, if that is a list.

    subcommands: by their last word, with their help; each is a command of its own, whose name has both words.
    """

    name: str
    help: str
    flags: tuple[Flag, ...]
    subcommands: Mapping[str, str]
    words: tuple[str, ...] = ()


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the shell."""
    parser.add_argument("shell", choices=sorted(SCRIPTS), help="for which shell; the script says where to put it")


def run(args: Namespace) -> int:
    """Print the script; 0."""
    sys.stdout.write(script(args.shell))
    return 0


def script(shell: str) -> str:
    """The completion script for one of SCRIPTS."""
    return SCRIPTS[shell]([_words_of(name) for name in _HELP])


def _words_of(name: str) -> CommandWords:
    parser = parsers.make_parser(name)
    flags: list[Flag] = []
    words: tuple[str, ...] = ()
    for action in parser._actions:
        if action.option_strings:
            flags.append(_flag_of(action))
        elif action.choices:
            words = tuple(map(str, action.choices))
    if parser.get_default("assignments") is not None:  # it takes the configuration's options by their full names
        flags += [
            Flag(names=(f"--{option.name}",), help=option.help, takes_value=True, values=_values_of(option))
            for option in options().values()
        ]
    below = {sub.removeprefix(f"{name} "): text for sub, text in _HELP.items() if sub.startswith(f"{name} ")}
    return CommandWords(name=name, help=_HELP[name], flags=tuple(flags), subcommands=below, words=words)


def _flag_of(action: Action) -> Flag:
    option = options().get(str(action.const))
    values = tuple(map(str, action.choices or ())) if option is None else _values_of(option)
    if action.dest == "profile":
        values = tuple(PROFILES)
    text = "" if action.help in (None, SUPPRESS) else str(action.help).replace("%%", "%")
    return Flag(names=tuple(action.option_strings), help=text, takes_value=action.nargs != 0, values=values)


def _values_of(option: Option) -> tuple[str, ...]:
    if option.kind is bool:
        return ("true", "false")
    return tuple(map(str, get_args(option.kind))) if get_origin(option.kind) is Literal else ()


def _with_values(commands: list[CommandWords]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each flag that takes a value, once, with the values."""
    seen: dict[str, tuple[str, ...]] = {}
    for command in commands:
        for flag in command.flags:
            if flag.takes_value:
                seen |= dict.fromkeys(flag.names, flag.values)
    yield from seen.items()


def _quoted(text: str) -> str:
    """In single quotes, for all three shells alike: a quote and a backslash are left out, help text needs neither."""
    return "'" + text.replace("\\", "/").replace("'", "’") + "'"


def _header(shell: str) -> str:
    return f"# {shell} completion for aserve: {_HINTS[shell]}\n"


def _bash(commands: list[CommandWords]) -> str:
    names = [command.name for command in _at_the_top(commands)]
    followed = dict(_with_values(commands))
    listed = "".join(
        f"        {flag}) words={_quoted(' '.join(values))} ;;\n" for flag, values in followed.items() if values
    )
    free = "|".join(flag for flag, values in followed.items() if not values)
    flags = "".join(
        f"        {_quoted(command.name)}) words={_quoted(' '.join(_names(command)))} ;;\n" for command in commands
    )
    firsts = "".join(
        f"        {command.name}) words={_quoted(' '.join(command.words))} ;;\n"
        for command in commands
        if command.words
    )
    seconds = "".join(
        f"        {command.name}) words={_quoted(' '.join(command.subcommands))} ;;\n"
        for command in commands
        if command.subcommands
    )
    return f"""{_header("bash")}
_aserve() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} command=serve words=
    if (( COMP_CWORD > 1 )); then
        case ${{COMP_WORDS[1]}} in {"|".join(names)}) command=${{COMP_WORDS[1]}} ;; esac
    fi
    if (( COMP_CWORD > 2 )); then
        case "$command ${{COMP_WORDS[2]}}" in {_alternatives(commands)}) command+=" ${{COMP_WORDS[2]}}" ;; esac
    fi
    # --flag=value comes as three words
    if [[ $current == = ]]; then
        current=
    elif [[ $previous == = ]]; then
        previous=${{COMP_WORDS[COMP_CWORD-2]}}
    fi
    COMPREPLY=()
    case $previous in
{listed}        {free}) return ;;
    esac
    if [[ -z $words && $current == -* ]]; then
        case $command in
{flags}        esac
    elif [[ -z $words ]] && (( COMP_CWORD == 1 )); then
        words={_quoted(" ".join(names))}
    elif [[ -z $words ]]; then
        case $command in
{firsts}        esac
        (( COMP_CWORD == 2 )) && case $command in
{seconds}        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o bashdefault -o default -F _aserve aserve
"""


def _zsh(commands: list[CommandWords]) -> str:
    followed = dict(_with_values(commands))
    listed = "".join(
        f"        {flag}) compadd -- {' '.join(values)}; return ;;\n" for flag, values in followed.items() if values
    )
    free = "|".join(flag for flag, values in followed.items() if not values)
    flags = "".join(
        f"            {_quoted(command.name)})\n                described=(\n"
        + "".join(
            f"                    {_described(name, flag.help)}\n" for flag in command.flags for name in flag.names
        )
        + "                ) ;;\n"
        for command in commands
    )
    firsts = "".join(
        f"            {command.name}) compadd -- {' '.join(command.words)}; return ;;\n"
        for command in commands
        if command.words
    )
    seconds = "".join(
        f"            {command.name}) compadd -- {' '.join(command.subcommands)} ;;\n"
        for command in commands
        if command.subcommands
    )
    top = _at_the_top(commands)
    names = "".join(f"            {_described(command.name, command.help)}\n" for command in top)
    return f"""#compdef aserve
{_header("zsh")}
_aserve() {{
    local command=serve
    local -a described
    if (( CURRENT > 2 )); then
        case $words[2] in {"|".join(command.name for command in top)}) command=$words[2] ;; esac
    fi
    if (( CURRENT > 3 )); then
        case "$command $words[3]" in {_alternatives(commands)}) command+=" $words[3]" ;; esac
    fi
    case $words[CURRENT-1] in
{listed}        {free}) _files; return ;;
    esac
    if [[ $PREFIX == -* ]]; then
        case $command in
{flags}        esac
        _describe -o option described
    elif (( CURRENT == 2 )); then
        described=(
{names}        )
        _describe command described
    else
        case $command in
{firsts}        esac
        (( CURRENT == 3 )) && case $command in
{seconds}        esac
        _files
    fi
}}
if [[ $funcstack[1] == _aserve ]]; then _aserve "$@"; else compdef _aserve aserve; fi
"""


def _fish(commands: list[CommandWords]) -> str:
    lines = [_header("fish").rstrip()]
    top = _at_the_top(commands)
    others = " ".join(command.name for command in top if command.name != "serve")
    lines += [
        f"complete -c aserve -f -n __fish_use_subcommand -a {command.name} -d {_quoted(command.help)}"
        for command in top
    ]
    for command in commands:
        seen = [f"__fish_seen_subcommand_from {word}" for word in command.name.split()]
        if command.name == "serve":  # which happens without a command
            seen = [f"not __fish_seen_subcommand_from {others}"]
        elif command.subcommands:
            seen.append(f"not __fish_seen_subcommand_from {' '.join(command.subcommands)}")
        place = _quoted("; and ".join(seen))
        for word, text in command.subcommands.items():
            lines.append(f"complete -c aserve -n {place} -a {word} -d {_quoted(text)}")
        if command.words:
            lines.append(f"complete -c aserve -f -n {place} -a {_quoted(' '.join(command.words))}")
        for flag in command.flags:
            spelled = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names)
            value = f" -x -a {_quoted(' '.join(flag.values))}" if flag.values else " -r" if flag.takes_value else ""
            lines.append(f"complete -c aserve -n {place} {spelled}{value} -d {_quoted(flag.help)}")
    return "\n".join(lines) + "\n"


def _described(name: str, text: str) -> str:
    """An entry of zsh's _describe."""
    return _quoted(f"{name}:{text}" if text else name)


def _at_the_top(commands: list[CommandWords]) -> list[CommandWords]:
    return [command for command in commands if " " not in command.name]


def _alternatives(commands: list[CommandWords]) -> str:
    """The names of two words, as a shell's pattern."""
    return "|".join(_quoted(command.name) for command in commands if " " in command.name)


def _names(command: CommandWords) -> list[str]:
    return [name for flag in command.flags for name in flag.names]


SCRIPTS: Final[dict[str, Callable[[list[CommandWords]], str]]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
