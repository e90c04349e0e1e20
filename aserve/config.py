"""One frozen Config, composed of the layers' own options: defaults < profile < file < environment < command line.

A section is a dataclass of options with a default and a sentence each. Everything here is generic over their fields and
type hints: int, float, bool, str, Literal and tuple[str, ...]. Unknown names, wrong types and values out of range are
ConfigErrors of one sentence that says where the value came from. ``python -m aserve.config`` prints the default file.
"""

import dataclasses
import math
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

from aserve import faults
from aserve.core.options import SchedulerOptions
from aserve.engine.options import EngineOptions
from aserve.errors import ConfigError
from aserve.model.options import ModelOptions
from aserve.obs.options import LogOptions, MetricsOptions, TraceOptions
from aserve.profiles import PROFILES
from aserve.server.options import LimitOptions, ServerOptions

PREFIX: Final = "ASERVE_"
FILE_VARIABLE: Final = "ASERVE_CONFIG"
PROFILE_VARIABLE: Final = "ASERVE_PROFILE"
PROFILE_KEY: Final = "profile"
"""Top-level key of a file, before its sections."""

OTHER_VARIABLES: Final = frozenset({FILE_VARIABLE, PROFILE_VARIABLE, faults.ENVIRONMENT, "ASERVE_CACHE_DIR"})
"""Variables that are no options. Names that begin with ASERVE_TEST_ belong to the tests."""

FLAGS: Final = MappingProxyType(
    {
        "--model": "model.model",
        "--served-model-name": "model.served_model_name",
        "--dtype": "model.dtype",
        "--threads": "model.threads",
        "--reference": "model.reference",
        "--host": "server.host",
        "--port": "server.port",
        "--api-key": "server.api_keys",
        "--max-num-seqs": "scheduler.max_num_seqs",
        "--max-num-batched-tokens": "scheduler.max_num_batched_tokens",
        "--max-model-len": "scheduler.max_model_len",
        "--block-size": "scheduler.block_size",
        "--num-blocks": "scheduler.num_blocks",
        "--policy": "scheduler.policy",
        "--log-level": "log.level",
    }
)
"""Short flags for the options that most people know under these names."""

SECRETS: Final = frozenset({"server.api_keys"})
"""Options whose values are never shown."""

RANGES: Final[Mapping[str, tuple[float, float]]] = MappingProxyType(
    {
        "model.threads": (0, 1024),
        "model.kv_cache_gib": (0, 1 << 20),
        "model.gpu_memory_utilization": (0.01, 1),
        "server.port": (0, 65535),
        "server.keepalive_comment_s": (0.1, 3600),
        "server.websocket_heartbeat_s": (0.1, 3600),
        "server.drain_timeout_s": (0, 86400),
        "limits.idle_timeout_s": (1, 86400),
        "limits.headers_timeout_s": (0.1, 3600),
        "limits.body_timeout_s": (0.1, 3600),
        "limits.write_stall_s": (0.1, 3600),
        "limits.write_buffer_bytes": (1024, 1 << 30),
        "limits.max_connections": (0, 1 << 20),
        "limits.max_body_bytes": (0, 1 << 40),
        "limits.max_json_depth": (4, 254),  # orjson writes no deeper
        "limits.max_requests_per_key": (0, 1 << 20),
        "limits.max_prompts": (1, 4096),
        "limits.max_stored_responses": (0, 1 << 20),
        "limits.max_stored_bytes": (0, 1 << 40),
        "limits.max_websockets": (0, 1 << 20),
        "limits.max_lanes": (1, 4096),
        "limits.max_lane_requests": (0, 1 << 16),
        "limits.max_socket_responses": (0, 1 << 16),
        "limits.max_socket_history_bytes": (0, 1 << 40),
        "limits.offload_bytes": (0, 1 << 30),
        "limits.num_workers": (1, 64),
        "limits.max_pending_work": (1, 1 << 16),
        "scheduler.max_num_seqs": (0, 4096),
        "scheduler.max_num_batched_tokens": (0, 1 << 20),
        "scheduler.max_model_len": (0, 1 << 24),
        "scheduler.block_size": (1, 1024),
        "scheduler.num_blocks": (0, 1 << 30),
        "scheduler.max_inflight": (1, 8),
        "scheduler.late_margin_ms": (0, 1000),
        "scheduler.watermark": (0, 0.5),
        "scheduler.long_prefill_threshold": (1, 1 << 24),
        "scheduler.max_long_partial_prefills": (1, 4096),
        "scheduler.prefill_ageing_steps": (1, 1 << 20),
        "scheduler.hash_bits": (1, 256),
        "scheduler.force_preempt_every": (0, 1 << 30),
        "scheduler.check_invariants_every": (0, 1 << 30),
        "engine.max_queue_requests": (1, 1 << 20),
        "engine.max_queue_tokens": (0, 1 << 40),
        "engine.mailbox_bytes": (1024, 1 << 30),
        "engine.mailbox_events": (1, 1 << 20),
        "engine.park_after_s": (0.001, 86400),
        "engine.stall_timeout_s": (0.1, 86400),
        "engine.request_timeout_s": (0, 86400 * 7),
        "engine.fan_out_slice": (1, 4096),
        "engine.max_joined_steps": (1, 8),
        "engine.watchdog_s": (0.1, 86400),
        "log.ring_size": (16, 1 << 20),
        "log.flush_interval_ms": (1, 60000),
        "log.close_timeout_s": (0, 60),
        "metrics.loop_lag_interval_ms": (0, 60000),
        "trace.num_steps": (0, 1 << 17),
    }
)
"""Least and greatest value of every number, both allowed. A test holds the names to the options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One option as it stands. ``value`` is for people: a secret is not in it."""

    name: str
    value: str
    origin: str
    help: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything that can be chosen. ``origins`` says of each option that is not at its default who set it.

    profile: the name of the one that was applied, or "".
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    server: ServerOptions = field(default_factory=ServerOptions, repr=False)  # holds the keys
    limits: LimitOptions = field(default_factory=LimitOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    log: LogOptions = field(default_factory=LogOptions)
    metrics: MetricsOptions = field(default_factory=MetricsOptions)
    trace: TraceOptions = field(default_factory=TraceOptions)
    profile: str = ""
    origins: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def settings(self) -> Iterator[Setting]:
        """Every option in order, with its origin: "default", or what set it."""
        for option in options().values():
            value = getattr(getattr(self, option.section), option.key)
            shown = f"{len(value)} set" if option.name in SECRETS else _toml_value(value)
            yield Setting(
                name=option.name, value=shown, origin=self.origins.get(option.name, "default"), help=option.help
            )

    def on(self, device: Literal["CPU", "GPU"], num_layer_parameters: int | None = None) -> "Config":
        """With the sequences and the token budget that this device takes where they are left open; their origins then
        say so.

        num_layer_parameters: as for ``gpu_batched_tokens``.
        """
        is_gpu, scheduler = device == "GPU", self.scheduler
        scheduler = scheduler.with_gpu_sizes(num_layer_parameters) if is_gpu else scheduler.with_sizes()
        origins = {
            name: f"{self.origins.get(name, 'default')} (0), decided for this {device}"
            for name in ("scheduler.max_num_seqs", "scheduler.max_num_batched_tokens")
            if not getattr(self.scheduler, name.removeprefix("scheduler."))
        }
        return dataclasses.replace(self, scheduler=scheduler, origins=MappingProxyType({**self.origins, **origins}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What is known of one option: ``name`` is section.key, ``kind`` its type hint."""

    name: str
    section: str
    key: str
    kind: Any
    default: Any
    help: str

    @property
    def is_list(self) -> bool:
        return get_origin(self.kind) is tuple

    def from_text(self, text: str) -> Any:
        """The value that ``text`` means, out of the environment or the command line. Raises ValueError."""
        if self.kind is str:
            return text
        if self.kind is bool:
            return _bool(text)
        if self.is_list:
            return tuple(part for part in (part.strip() for part in text.split(",")) if part)
        if get_origin(self.kind) is Literal:
            choices = {str(choice): choice for choice in get_args(self.kind)}
            if text not in choices:
                raise ValueError(_not_a_choice(text, choices))
            return choices[text]
        return _number(self.kind, text)

    def from_toml(self, value: Any) -> Any:
        """``value`` out of a file, if it has the right type; an integer will do for a float. Raises ValueError."""
        if self.is_list:
            if not isinstance(value, list) or not all(type(item) is str for item in value):
                raise ValueError(f"{value!r} is not a list of strings")
            return tuple(value)
        if get_origin(self.kind) is Literal:
            choices = get_args(self.kind)
            if not any(type(choice) is type(value) and choice == value for choice in choices):
                raise ValueError(_not_a_choice(value, choices))
            return value
        if self.kind is float and type(value) is int:
            return float(value)
        if type(value) is not self.kind:
            raise ValueError(f"{value!r} is not {_KIND_NAMES[self.kind]}")
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Text given to an option on the command line. ``origin`` is how it was written there, such as "--port"."""

    name: str
    text: str
    origin: str


@cache
def options() -> Mapping[str, Option]:
    """Every option by its name, section.key, in the order of the file."""
    found = {}
    for section in dataclasses.fields(Config):
        section_type = get_type_hints(Config)[section.name]
        if not dataclasses.is_dataclass(section_type):
            continue
        hints = get_type_hints(section_type)
        for item in dataclasses.fields(section_type):
            name = f"{section.name}.{item.name}"
            found[name] = Option(
                name=name,
                section=section.name,
                key=item.name,
                kind=hints[item.name],
                default=item.default,
                help=item.metadata["help"],
            )
    return MappingProxyType(found)


def find_option(name: str) -> Option:
    """The option ``name``, dashes as good as underscores. Raises ConfigError that names the nearest."""
    normal = name.replace("-", "_")
    option = options().get(normal)
    if option is None:
        raise ConfigError(f"There is no option {name!r}{_nearest(normal, options())}.")
    return option


def find_keyword(keyword: str) -> Option:
    """The option that a program calls section.key, section__key, or key alone, which no two sections share.

    Raises ConfigError that names the nearest.
    """
    name = keyword.replace("__", ".")
    by_key = {option.key: option for option in options().values()}
    option = by_key.get(name) or options().get(name)
    if option is None:
        raise ConfigError(f"There is no option {keyword!r}{_nearest(name, options())}.")
    return option


def load_config(
    *,
    file: str = "",
    profile: str = "",
    environment: Mapping[str, str] | None = None,
    command_line: Sequence[Assignment] = (),
    keywords: Mapping[str, Any] | None = None,
) -> Config:
    """Put the sources together. ``file`` wins over the environment's ASERVE_CONFIG; neither means no file.

    profile: wins over ASERVE_PROFILE, and that over the file's own ``profile``; an explicit value of any source wins
    over it. keywords: values with types, from a program that embeds the engine; the strongest source. Raises
    ConfigError.
    """
    environment = {} if environment is None else environment
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    file = file or environment.get(FILE_VARIABLE, "")
    content = _read_file(file) if file else {}
    profile, profile_origin = _chosen_profile(profile, environment, content, file)
    sources = [
        _from_profile(profile, profile_origin),
        _from_file(content, file),
        _from_environment(environment),
        _from_command_line(command_line),
        _from_keywords(keywords or {}),
    ]
    for source in sources:
        for option, value, origin in source:
            values[option.name] = value
            origins[option.name] = origin
    for name, value in values.items():
        _check_range(name, value, origins[name])
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, key = name.split(".")
        sections.setdefault(section, {})[key] = value
    types = get_type_hints(Config)
    made = {section: types[section](**chosen) for section, chosen in sections.items()}
    config = Config(**made, profile=profile, origins=MappingProxyType(origins))
    _check_together(config)
    return config


def render_default_toml() -> str:
    """The file ``config.toml``: every option at its default under its sentence."""
    lines = [
        "# Every option of aserve with its default. `python -m aserve --config FILE` reads such a file, which needs",
        "# only what differs. The environment (ASERVE_SECTION__KEY) and the command line (--section.key) win over it.",
        "",
        f"# A set of values for a goal: {', '.join(PROFILES)}; empty is none. What stands below wins over",
        "# the profile, so keep only what is meant.",
        f'{PROFILE_KEY} = ""',
    ]
    for section, members in groupby(options().values(), key=lambda option: option.section):
        lines += ["", f"[{section}]"]
        for option in members:
            choices = get_args(option.kind) if get_origin(option.kind) is Literal else ()
            listed = f" One of {', '.join(map(_toml_value, choices))}." if choices else ""
            lines += ["", f"# {option.help}{listed}", f"{option.key} = {_toml_value(option.default)}"]
    return "\n".join(lines) + "\n"


def _read_file(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The config file {path!r} cannot be read: {error.strerror}.") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise ConfigError(f"The config file {path!r} is not valid TOML: {error}.") from error


def _chosen_profile(
    given: str, environment: Mapping[str, str], content: Mapping[str, Any], file: str
) -> tuple[str, str]:
    """The profile that the strongest source names, and that source for an error message. "" is none."""
    if given:
        return given, ""
    if named := environment.get(PROFILE_VARIABLE):
        return named, f" (environment {PROFILE_VARIABLE})"
    named = content.get(PROFILE_KEY, "")
    if not isinstance(named, str):
        raise ConfigError(f"{file}: {PROFILE_KEY} is the name of a profile, not {named!r}.")
    return named, f" (file {file})"


def _from_profile(name: str, origin: str) -> Iterator[tuple[Option, Any, str]]:
    if not name:
        return
    if name not in PROFILES:
        near = get_close_matches(name, PROFILES, n=1)
        hint = f"; the nearest is {near[0]}" if near else f": it is one of {', '.join(PROFILES)}"
        raise ConfigError(f"There is no profile {name!r}{origin}{hint}.")
    for option_name, choice in PROFILES[name].choices.items():
        yield options()[option_name], choice.value, f"profile {name}"


def _from_file(content: Mapping[str, Any], path: str) -> Iterator[tuple[Option, Any, str]]:
    section_names = list(dict.fromkeys(option.section for option in options().values()))
    for section, members in content.items():
        if section == PROFILE_KEY:
            continue
        if not isinstance(members, dict):
            raise ConfigError(f"{path}: {section!r} stands outside of any section{_nearest(section, options())}.")
        if section not in section_names:
            raise ConfigError(f"{path}: there is no section [{section}]{_nearest(section, section_names)}.")
        for key, value in members.items():
            option = options().get(f"{section}.{key}")
            if option is None:
                name = f"{section}.{key}"
                raise ConfigError(f"{path}: there is no option {name!r}{_nearest(name, options())}.")
            try:
                yield option, option.from_toml(value), f"file {path}"
            except ValueError as error:
                raise ConfigError(f"{option.name} (file {path}): {_hidden(option, value, error)}.") from error


def _from_environment(environment: Mapping[str, str]) -> Iterator[tuple[Option, Any, str]]:
    by_variable = {variable_of(option): option for option in options().values()}
    for variable in sorted(environment):
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES or variable.startswith(f"{PREFIX}TEST_"):
            continue
        option = by_variable.get(variable)
        if option is None:
            near = _nearest(variable, [*by_variable, *sorted(OTHER_VARIABLES)])
            raise ConfigError(f"The environment variable {variable} is no option{near}.")
        yield option, _parsed(option, environment[variable], f"environment {variable}"), f"environment {variable}"


def _from_command_line(assignments: Sequence[Assignment]) -> Iterator[tuple[Option, Any, str]]:
    lists: dict[str, tuple[str, ...]] = {}
    for assignment in assignments:
        option = find_option(assignment.name)
        origin = f"command line {assignment.origin}"
        value = _parsed(option, assignment.text, origin)
        if option.is_list:  # a flag that is given again adds to the list
            value = lists[option.name] = lists.get(option.name, ()) + value
        yield option, value, origin


def _from_keywords(keywords: Mapping[str, Any]) -> Iterator[tuple[Option, Any, str]]:
    for keyword, value in keywords.items():
        option = find_keyword(keyword)
        try:
            value = option.from_toml(list(value) if isinstance(value, tuple) else value)
        except ValueError as error:
            raise ConfigError(f"{option.name}: {_hidden(option, value, error)}.") from error
        yield option, value, "keyword"


def variable_of(option: Option) -> str:
    """The environment variable that sets an option."""
    return f"{PREFIX}{option.section}__{option.key}".upper()


def _parsed(option: Option, text: str, origin: str) -> Any:
    try:
        return option.from_text(text)
    except ValueError as error:
        raise ConfigError(f"{option.name} ({origin}): {_hidden(option, text, error)}.") from error


def _hidden(option: Option, value: object, error: ValueError) -> str:
    return "the value has the wrong type" if option.name in SECRETS else str(error)


def _check_range(name: str, value: Any, origin: str) -> None:
    if name not in RANGES:
        return
    least, greatest = RANGES[name]
    if not least <= value <= greatest:
        raise ConfigError(f"{name} ({origin}): {value} is not between {least} and {greatest}.")


def _check_together(config: Config) -> None:
    """What no single range can say."""
    scheduler = config.scheduler
    if 0 < scheduler.num_blocks < 8:
        raise ConfigError(f"scheduler.num_blocks: {scheduler.num_blocks} is too few; at least 8, or 0 for automatic.")
    least = scheduler.min_batched_tokens
    if 0 < scheduler.max_num_batched_tokens < least:
        raise ConfigError(
            f"scheduler.max_num_batched_tokens: {scheduler.max_num_batched_tokens} is too few; "
            f"a step must hold max_num_seqs + block_size = {least} tokens; 0 is automatic."
        )


_KIND_NAMES: Final = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
_BOOLS: Final = {**dict.fromkeys(("true", "yes", "on", "1"), True), **dict.fromkeys(("false", "no", "off", "0"), False)}


def _bool(text: str) -> bool:
    if text.strip().lower() not in _BOOLS:
        raise ValueError(f"{text!r} is not {_KIND_NAMES[bool]}")
    return _BOOLS[text.strip().lower()]


def _number(kind: type[int] | type[float], text: str) -> int | float:
    try:
        number = kind(text)
    except ValueError:
        raise ValueError(f"{text!r} is not {_KIND_NAMES[kind]}") from None
    if isinstance(number, float) and not math.isfinite(number):
        raise ValueError(f"{text!r} is not a finite number")
    return number


def _not_a_choice(value: object, choices: Iterable[object]) -> str:
    return f"{value!r} is none of {', '.join(map(str, choices))}"


def _nearest(name: str, known: Iterable[str]) -> str:
    """ "; the nearest is …" or nothing. A key without its section, or with a wrong one, finds its namesake."""
    names = list(known)
    key = name.rpartition(".")[2].lower()
    namesakes = [each for each in names if each.rpartition(".")[2] == key]
    near = namesakes or get_close_matches(name, names, n=1, cutoff=0.5)
    if not near:
        by_key = {each.rpartition(".")[2]: each for each in names}
        near = [by_key[each] for each in get_close_matches(key, by_key, n=1, cutoff=0.6)]
    return f"; the nearest is {near[0]}" if near else ""


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    return repr(value)


if __name__ == "__main__":
    sys.stdout.write(render_default_toml())
