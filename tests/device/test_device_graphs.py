"""Which sizes of steps are captured."""

import pytest

from aserve.device.graphs import fitting, row_buckets, token_buckets

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("largest", [1, 2, 5, 8, 17, 64, 100, 256, 1000])
def test_row_buckets_rise_to_the_largest(largest: int) -> None:
    """Every number of rows has one, and none is larger than needed."""
    buckets = row_buckets(largest)

    assert buckets == sorted(set(buckets))
    assert buckets[-1] == largest


@pytest.mark.parametrize("largest", [4, 16, 48, 512, 600, 2048, 8192])
def test_token_buckets_rise_to_the_largest(largest: int) -> None:
    """The same for tokens of steps with chunks."""
    buckets = token_buckets(largest)

    assert buckets == sorted(set(buckets))
    assert buckets[-1] == largest


def test_padding_stays_within_a_quarter_above_some_hundred_tokens() -> None:
    """Below, weights take the time, and padding costs little."""
    buckets = token_buckets(8192)

    assert max(fitting(buckets, size) / size for size in range(256, 8193)) <= 1.25


def test_the_smallest_bucket_that_fits() -> None:
    """Exact sizes have their own."""
    assert [fitting([1, 2, 4, 8], size) for size in (1, 2, 3, 8)] == [1, 2, 4, 8]
