"""Profiles: sets of values between the defaults and whatever was set explicitly."""

from collections import Counter
from pathlib import Path

import pytest

from aserve.config import Assignment, Config, load_config, options
from aserve.errors import ConfigError
from aserve.profiles import PROFILES


def flag(name: str, text: str) -> Assignment:
    return Assignment(name=name, text=text, origin=f"--{name}")


def origin(config: Config, name: str) -> str:
    return next(setting.origin for setting in config.settings() if setting.name == name)


def refusal(**sources: object) -> str:
    with pytest.raises(ConfigError) as raised:
        load_config(**sources)  # type: ignore[arg-type]
    return raised.value.message


@pytest.mark.parametrize("name", PROFILES)
def test_values_are_what_a_file_could_say(name: str) -> None:
    """Each choice names an option, has its type, lies in its range, and differs from the default or pins it."""
    for option_name, choice in PROFILES[name].choices.items():
        option = options()[option_name]
        assert option.from_toml(choice.value) == choice.value
        assert type(choice.value) is type(option.default)
        assert choice.reason.endswith(".")
    pinned = [each for each, choice in PROFILES[name].choices.items() if choice.value == options()[each].default]

    assert load_config(profile=name).profile == name
    assert pinned in ([], ["scheduler.enable_prefix_caching"])


def test_a_profile_changes_its_options_only() -> None:
    """Each value of the profile says where it comes from; every other option stays at its default."""
    config = load_config(profile="latency")
    changed = {setting.name for setting in config.settings() if setting.origin == "profile latency"}

    assert config.scheduler.max_num_seqs == PROFILES["latency"].choices["scheduler.max_num_seqs"].value
    assert changed == set(PROFILES["latency"].choices)
    assert {setting.origin for setting in config.settings() if setting.name not in changed} == {"default"}


@pytest.mark.parametrize("source", ["file", "environment", "command line"])
def test_an_explicit_value_wins(tmp_path: Path, source: str) -> None:
    """Whoever sets an option by name wins over the profile, even with the default's value."""
    file = tmp_path / "my.toml"
    file.write_text("[scheduler]\nmax_num_seqs = 64" if source == "file" else "")

    config = load_config(
        profile="latency",
        file=str(file),
        environment={"ASERVE_SCHEDULER__MAX_NUM_SEQS": "64"} if source == "environment" else {},
        command_line=[flag("scheduler.max_num_seqs", "64")] if source == "command line" else [],
    )

    assert config.scheduler.max_num_seqs == 64
    assert origin(config, "scheduler.max_num_seqs").startswith(source)
    assert origin(config, "scheduler.policy") == "profile latency"


def test_who_names_the_profile(tmp_path: Path) -> None:
    """The command line's profile wins over the environment's, and that over the file's; they do not add up."""
    file = tmp_path / "my.toml"
    file.write_text('profile = "edge"\n[log]\nlevel = "debug"')
    environment = {"ASERVE_PROFILE": "agent"}

    assert load_config(file=str(file)).profile == "edge"
    assert load_config(file=str(file)).log.level == "debug"
    assert load_config(file=str(file), environment=environment).profile == "agent"
    config = load_config(file=str(file), environment=environment, profile="latency")
    assert config.profile == "latency"
    assert set(config.origins.values()) == {"profile latency", f"file {file}"}


def test_unknown_profiles(tmp_path: Path) -> None:
    """A name that is no profile is told with where it stands and what is near."""
    file = tmp_path / "my.toml"
    file.write_text('profile = "zzz"')

    assert refusal(profile="latncy") == "There is no profile 'latncy'; the nearest is latency."
    assert refusal(environment={"ASERVE_PROFILE": "edgy"}) == (
        "There is no profile 'edgy' (environment ASERVE_PROFILE); the nearest is edge."
    )
    assert refusal(file=str(file)) == (
        f"There is no profile 'zzz' (file {file}): it is one of throughput, latency, agent, edge."
    )
    file.write_text("profile = 1")
    assert refusal(file=str(file)) == f"{file}: profile is the name of a profile, not 1."


def test_keywords_have_types_and_win() -> None:
    """A program names options by key, section__key or section.key; the values are typed as in a file."""
    keywords = {"max_num_seqs": 2, "model__threads": 1, "log.level": "error", "served_model_name": ("a",)}
    config = load_config(profile="latency", keywords=keywords)

    assert (config.scheduler.max_num_seqs, config.model.threads, config.log.level) == (2, 1, "error")
    assert config.model.served_model_name == ("a",)
    assert origin(config, "scheduler.max_num_seqs") == "keyword"
    assert refusal(keywords={"max_num_seq": 1}) == (
        "There is no option 'max_num_seq'; the nearest is scheduler.max_num_seqs."
    )
    assert refusal(keywords={"threads": "1"}) == "model.threads: '1' is not an integer."


def test_no_two_sections_share_a_key() -> None:
    """So a key alone names its option."""
    assert [key for key, count in Counter(option.key for option in options().values()).items() if count > 1] == []
