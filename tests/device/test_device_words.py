"""The layout of result words, between the kernel that writes them and the event that reads them."""

import numpy as np
import pytest

from aserve.device.event import STEP_SHIFT, WordEvent

pytestmark = pytest.mark.torch


def test_words_carry_their_step_where_the_kernels_put_it() -> None:
    """What the kernels' own reader takes apart is what the event waits for."""
    pytest.importorskip("triton")
    from aserve.model.kernels.slot_update import unpack_words

    words = np.array([(7 << STEP_SHIFT) | (2 << 24) | 40_000], np.int64)

    assert [part.item() for part in unpack_words(words)] == [7, 2, 40_000]
    assert WordEvent(words, 7).query()
