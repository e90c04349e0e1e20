"""Four sources make one Config; every mistake is one sentence that says where it was made and what is near."""

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aserve import config as config_module
from aserve.config import (
    FLAGS,
    RANGES,
    SECRETS,
    Assignment,
    Config,
    find_option,
    load_config,
    options,
    render_default_toml,
    variable_of,
)
from aserve.errors import ConfigError

ROOT = Path(__file__).parent.parent


def written(folder: Path, text: str) -> str:
    """The path of a config file that holds ``text``."""
    path = folder / "some.toml"
    path.write_text(text)
    return str(path)


def given_on_command_line(**names: str) -> list[Assignment]:
    """``server__port="1"`` is ``--server.port 1``."""
    return [
        Assignment(name=name.replace("__", "."), text=text, origin=f"--{name.replace('__', '.')}")
        for name, text in names.items()
    ]


def mistake(
    *, file: str = "", environment: Mapping[str, str] | None = None, command_line: list[Assignment] | None = None
) -> str:
    """The sentence with which loading is refused."""
    with pytest.raises(ConfigError) as raised:
        load_config(file=file, environment=environment, command_line=command_line or [])
    message = raised.value.message
    assert message.endswith(".")
    assert "\n" not in message
    return message


def test_defaults() -> None:
    """Without any source every option is at its own default."""
    assert load_config() == Config()
    assert {setting.origin for setting in load_config().settings()} == {"default"}


def test_precedence(tmp_path: Path) -> None:
    """Defaults give way to the file, that to the environment, that to the command line; each value knows its origin."""
    file = written(tmp_path, "[server]\nport = 1\nhost = 'file'\n[log]\nring_size = 100\n[engine]\nmailbox_events = 7")

    config = load_config(
        file=file,
        environment={"ASERVE_SERVER__PORT": "2", "ASERVE_LOG__RING_SIZE": "200"},
        command_line=given_on_command_line(server__port="3"),
    )

    assert (config.server.port, config.server.host, config.log.ring_size) == (3, "file", 200)
    assert config.engine.mailbox_events == 7
    assert config.origins == {
        "server.port": "command line --server.port",
        "server.host": f"file {file}",
        "log.ring_size": "environment ASERVE_LOG__RING_SIZE",
        "engine.mailbox_events": f"file {file}",
    }


def test_file_named_by_the_environment(tmp_path: Path) -> None:
    """ASERVE_CONFIG names a file unless the command line names another."""
    other = tmp_path / "other.toml"
    other.write_text("[server]\nport = 2")
    environment = {"ASERVE_CONFIG": written(tmp_path, "[server]\nport = 1")}

    assert load_config(environment=environment).server.port == 1
    assert load_config(environment=environment, file=str(other)).server.port == 2


def test_a_config_file_in_the_folder_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a file that was named counts, not one that lies about."""
    (tmp_path / "config.toml").write_text("[server]\nport = 1")
    monkeypatch.chdir(tmp_path)

    assert load_config().server.port == 8000


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("server.port", "9000", 9000),
        ("scheduler.watermark", "0.25", 0.25),
        ("scheduler.watermark", "0", 0.0),
        ("model.reference", "true", True),
        ("model.reference", "OFF", False),
        ("model.reference", "1", True),
        ("server.host", "", ""),
        ("log.level", "debug", "debug"),
        ("server.queue_full_status", "429", 429),
        ("server.api_keys", "a, b,,c ", ("a", "b", "c")),
        ("server.api_keys", "", ()),
        ("max-num-seqs", "8", None),
        ("scheduler.max-num-seqs", "8", 8),
    ],
)
def test_text_becomes_a_value(name: str, text: str, expected: Any) -> None:
    """Each kind of option is read from text; dashes are as good as underscores; a section is needed."""
    command_line = [Assignment(name=name, text=text, origin="--set")]
    if expected is None:
        assert (
            mistake(command_line=command_line) == f"There is no option {name!r}; the nearest is scheduler.max_num_seqs."
        )
        return
    config = load_config(command_line=command_line)

    section, key = name.replace("-", "_").split(".")
    value = getattr(getattr(config, section), key)
    assert (value, type(value)) == (expected, type(expected))


def test_lists_on_the_command_line_add_up() -> None:
    """A flag that is given again adds to a list, which replaces what the environment said; others are replaced."""
    config = load_config(
        environment={"ASERVE_SERVER__API_KEYS": "z"},
        command_line=[
            Assignment(name="server.api_keys", text="a", origin="--api-key"),
            Assignment(name="server.port", text="1", origin="--port"),
            Assignment(name="server.api_keys", text="b,c", origin="--api-key"),
            Assignment(name="server.port", text="2", origin="--port"),
        ],
    )

    assert config.server.api_keys == ("a", "b", "c")
    assert config.server.port == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[server]\nport = 9000", 9000),
        ("[scheduler]\nwatermark = 0", 0.0),
        ("[server]\napi_keys = ['a,b']", ("a,b",)),
        ("[server]\nqueue_full_status = 429", 429),
        ("[model]\nreference = true", True),
    ],
)
def test_file_values(tmp_path: Path, text: str, expected: Any) -> None:
    """A file's values have types of their own; an integer will do for a number; a list's strings stay whole."""
    config = load_config(file=written(tmp_path, text))

    (name,) = config.origins
    section, key = name.split(".")
    value = getattr(getattr(config, section), key)
    assert (value, type(value)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[server]\nport = '9000'", "server.port (file PATH): '9000' is not an integer."),
        ("[server]\nport = 9000.0", "server.port (file PATH): 9000.0 is not an integer."),
        ("[server]\nport = true", "server.port (file PATH): True is not an integer."),
        ("[server]\nhost = 1", "server.host (file PATH): 1 is not a string."),
        ("[server]\ncors_origins = 'a'", "server.cors_origins (file PATH): 'a' is not a list of strings."),
        ("[server]\napi_keys = 'sesame'", "server.api_keys (file PATH): the value has the wrong type."),
        ("[server]\nqueue_full_status = '503'", "server.queue_full_status (file PATH): '503' is none of 503, 429."),
        ("[model]\nreference = 1", "model.reference (file PATH): 1 is not true or false."),
        ("[scheduler]\nwatermark = nan", "scheduler.watermark (file PATH): nan is not between 0 and 0.5."),
        ("[log]\nlevel = 'loud'", "log.level (file PATH): 'loud' is none of debug, info, warning, error."),
        ("[server]\nprot = 1", "PATH: there is no option 'server.prot'; the nearest is server.port."),
        ("[log]\nport = 1", "PATH: there is no option 'log.port'; the nearest is server.port."),
        ("[sever]\nport = 1", "PATH: there is no section [sever]; the nearest is server."),
        ("[zzz]", "PATH: there is no section [zzz]."),
        ("port = 1", "PATH: 'port' stands outside of any section; the nearest is server.port."),
        ("server = 1", "PATH: 'server' stands outside of any section; the nearest is server.port."),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, text: str, expected: str) -> None:
    """A wrong type, an unknown option or section of a file is told with the file's name and what is near."""
    file = written(tmp_path, text)

    assert mistake(file=file) == expected.replace("PATH", file)


def test_unreadable_files(tmp_path: Path) -> None:
    """A file that is missing, no TOML or no text is told by name."""
    broken = written(tmp_path, "[server\n")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")

    assert mistake(file="/no/such.toml") == "The config file '/no/such.toml' cannot be read: No such file or directory."
    assert mistake(file=broken).startswith(f"The config file {broken!r} is not valid TOML: ")
    assert mistake(file=str(binary)).startswith(f"The config file {str(binary)!r} is not valid TOML: ")


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("ASERVE_SERVER__PROT", "ASERVE_SERVER__PORT"),
        ("ASERVE_SERVER_PORT", "ASERVE_SERVER__PORT"),
        ("ASERVE_CONFIGS", "ASERVE_CONFIG"),
    ],
)
def test_unknown_variables(variable: str, nearest: str) -> None:
    """A variable that begins like ours and is none of ours is told with the nearest."""
    expected = f"The environment variable {variable} is no option; the nearest is {nearest}."

    assert mistake(environment={variable: "1"}) == expected


def test_other_variables_are_let_alone() -> None:
    """Foreign variables, and ours that are no options, do no harm."""
    environment = {"PATH": "/bin", "ASERVE_FAULTS": "", "ASERVE_CACHE_DIR": "/tmp", "ASERVE_TEST_CACHE": "/tmp"}

    assert load_config(environment=environment) == Config()


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("server.port", "many", "'many' is not an integer"),
        ("server.port", "1.5", "'1.5' is not an integer"),
        ("server.port", "9" * 400, f"{'9' * 400} is not between 0 and 65535"),
        ("server.port", "-1", "-1 is not between 0 and 65535"),
        ("scheduler.watermark", "inf", "'inf' is not a finite number"),
        ("scheduler.watermark", "nan", "'nan' is not a finite number"),
        ("scheduler.max_inflight", "9", "9 is not between 1 and 8"),
        ("model.reference", "maybe", "'maybe' is not true or false"),
        ("log.level", "loud", "'loud' is none of debug, info, warning, error"),
    ],
)
def test_mistakes_in_text(name: str, text: str, expected: str) -> None:
    """Wrong text is told with the option and the flag or variable that brought it."""
    variable = variable_of(find_option(name))

    assert mistake(environment={variable: text}) == f"{name} (environment {variable}): {expected}."
    assert (
        mistake(command_line=[Assignment(name=name, text=text, origin="--set")])
        == f"{name} (command line --set): {expected}."
    )


def test_a_default_is_not_blamed() -> None:
    """A value out of range that a better source replaces does not matter."""
    config = load_config(
        environment={"ASERVE_SERVER__PORT": "70000"}, command_line=given_on_command_line(server__port="1")
    )

    assert config.server.port == 1


def test_options_that_need_each_other() -> None:
    """What only two options together can get wrong is told too."""
    assert mistake(command_line=given_on_command_line(scheduler__num_blocks="7")) == (
        "scheduler.num_blocks: 7 is too few; at least 8, or 0 for automatic."
    )
    assert mistake(command_line=given_on_command_line(scheduler__max_num_batched_tokens="32")).startswith(
        "scheduler.max_num_batched_tokens: 32 is too few;"
    )
    too_few = given_on_command_line(scheduler__max_num_seqs="600", scheduler__max_num_batched_tokens="512")
    assert mistake(command_line=too_few) == (
        "scheduler.max_num_batched_tokens: 512 is too few; a step must hold max_num_seqs + block_size = 632 tokens; "
        "0 is automatic."
    )


@pytest.mark.parametrize(
    ("max_num_seqs", "num_parameters", "on_cpu", "on_gpu"),
    [
        (64, None, 512, 1024),
        (600, None, 632, 1024),
        (1000, 7_000_000_000, 1032, 1032),
        (64, 4_000_000_000, 512, 1024),
        (64, 3_999_999_999, 512, 2048),
        (64, 1_000_000_000, 512, 2048),
    ],
)
def test_the_device_decides_the_token_budget(
    max_num_seqs: int, num_parameters: int | None, on_cpu: int, on_gpu: int
) -> None:
    """Unless somebody sets it, and a GPU by the model's size; a step holds every row and a block. The origin names
    the device."""
    config = load_config(keywords={"scheduler.max_num_seqs": max_num_seqs})
    settings = config.on("GPU", num_parameters).settings()
    (setting,) = [each for each in settings if each.name == "scheduler.max_num_batched_tokens"]

    assert config.on("CPU").scheduler.max_num_batched_tokens == on_cpu
    assert (setting.value, setting.origin) == (str(on_gpu), "default (0), decided for this GPU")


@pytest.mark.parametrize(
    ("budget", "on_cpu", "on_gpu"),
    [(0, (64, 512), (256, 1024)), (700, (64, 700), (256, 700)), (100, (64, 100), (68, 100)), (40, (8, 40), (8, 40))],
)
def test_the_device_decides_how_many_sequences_run(
    budget: int, on_cpu: tuple[int, int], on_gpu: tuple[int, int]
) -> None:
    """Unless somebody sets it, and no more than a budget that is set has room for beside a block."""
    config = load_config(keywords={"scheduler.max_num_batched_tokens": budget})
    found = [config.on(device).scheduler for device in ("CPU", "GPU")]
    (setting,) = [each for each in config.on("GPU").settings() if each.name == "scheduler.max_num_seqs"]

    assert [(each.max_num_seqs, each.max_num_batched_tokens) for each in found] == [on_cpu, on_gpu]
    assert setting.origin == "default (0), decided for this GPU"


def test_what_is_set_is_no_devices_business() -> None:
    """Neither the values nor their origins change."""
    given = given_on_command_line(scheduler__max_num_seqs="8", scheduler__max_num_batched_tokens="700")
    config = load_config(command_line=given)

    assert config.on("GPU") == config
    assert config.on("GPU").origins == config.origins


def test_secrets_are_not_shown() -> None:
    """Neither the settings nor the config's own repr show a key."""
    config = load_config(environment={"ASERVE_SERVER__API_KEYS": "sesame,street"})

    (keys,) = [setting for setting in config.settings() if setting.name == "server.api_keys"]
    assert (keys.value, keys.origin) == ("2 set", "environment ASERVE_SERVER__API_KEYS")
    assert "sesame" not in repr(config)


def test_config_is_frozen() -> None:
    """Nothing can be changed after the start."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().log.level = "debug"  # type: ignore[misc]


def test_both_default_files_are_as_rendered() -> None:
    """The package's config.toml and the top level's equal the options (``python -m aserve.config`` prints it anew)."""
    package = Path(config_module.__file__).with_name("config.toml").read_text()

    assert package == render_default_toml()
    assert (ROOT / "config.toml").read_text() == package


def test_default_file_reads_as_the_defaults() -> None:
    """Read as a config file, the default file changes nothing and names every option."""
    file = str(ROOT / "config.toml")
    config = load_config(file=file)

    assert config == Config()
    assert list(config.origins) == list(options())


def test_every_option_has_a_sentence() -> None:
    """Every option explains itself in a sentence that ends with a full stop."""
    assert [option.name for option in options().values() if not option.help.endswith(".")] == []


def test_every_number_has_a_range_that_holds_its_default() -> None:
    """The table of ranges names exactly the numbers, and no default is out of range."""
    numbers = {option.name: option for option in options().values() if option.kind in (int, float)}

    assert set(RANGES) == set(numbers)
    assert [name for name, option in numbers.items() if not RANGES[name][0] <= option.default <= RANGES[name][1]] == []


def test_flags_and_secrets_name_options() -> None:
    """The tables of flags and of secrets hold options only."""
    assert set(FLAGS.values()) - set(options()) == set()
    assert SECRETS - set(options()) == set()


def test_every_kind_is_handled() -> None:
    """No option has a type hint that the readers do not know."""
    assert [
        option.name
        for option in options().values()
        if option.kind not in (int, float, bool, str, tuple[str, ...]) and get_origin(option.kind) is not Literal
    ] == []


@given(st.sampled_from(sorted(options())), st.text(max_size=12))
def test_any_text_is_a_value_or_a_mistake(name: str, text: str) -> None:
    """Whatever the text, loading gives a Config or a ConfigError of one line."""
    try:
        load_config(command_line=[Assignment(name=name, text=text, origin="--set")])
    except ConfigError as error:
        assert error.message.startswith(name)


@given(st.text(st.sampled_from('a"\\é'), max_size=8))
def test_rendered_strings_read_back(text: str) -> None:
    """A string in the rendered file is TOML for itself."""
    assert tomllib.loads(f"x = {config_module._toml_value(text)}") == {"x": text}
