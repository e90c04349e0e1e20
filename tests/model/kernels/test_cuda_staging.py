"""The arrays that plans are written into, on the host's side and on the device's."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent))

from cuda_builders import EagerDevice
from kernel_builders import DEVICE

from aserve.device.graphs import CudaDevice, StepDevice
from aserve.model.cuda_pinned import Staging
from aserve.model.kernels.differences import LENGTH
from aserve.model.kernels.fetch import BLOCK, fetch_words

pytestmark = pytest.mark.torch

NUM_ARRAYS, NUM_WORDS = 3, 4 * BLOCK


class PendingEvent:
    """Passes when it is waited for."""

    def __init__(self) -> None:
        self.num_waits = 0

    def query(self) -> bool:
        return self.num_waits > 0

    def synchronize(self) -> None:
        self.num_waits += 1


def a_device() -> StepDevice:
    return CudaDevice() if DEVICE == "cuda" else EagerDevice()


def some_arrays(num_words: int = NUM_WORDS) -> torch.Tensor:
    return a_device().pinned(NUM_ARRAYS, num_words, dtype=torch.int32)


@pytest.mark.parametrize("length", [LENGTH + 1, 100, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5, NUM_WORDS])
def test_what_was_written_arrives(length: int) -> None:
    """All of it, of a plan after the other, more of them than there are arrays; of a small one not the whole array."""
    arrays = some_arrays()
    staging = Staging(a_device(), arrays)
    turn = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    target = torch.full((NUM_WORDS,), -1, dtype=torch.int32, device=DEVICE)
    for step in range(2 * NUM_ARRAYS + 1):
        words = staging.take()
        words[:length] = np.arange(step, step + length)
        words[LENGTH] = length
        expected = words[:length].tolist()
        fetch_words(arrays, turn, words_W=target)
        staging.sent()
        staging.fence(PendingEvent())

        assert target[:length].tolist() == expected
        assert (target[-(-length // BLOCK) * BLOCK :] == -1).all()
    assert turn.item() == 2 * NUM_ARRAYS + 1


def test_an_array_may_be_shorter_than_what_is_read_in_one_go() -> None:
    """What lies behind it is not touched."""
    size = BLOCK // 2
    arrays = some_arrays(size)
    arrays[1] = torch.arange(size)
    arrays[1, LENGTH] = size
    turn = torch.full((1,), NUM_ARRAYS + 1, dtype=torch.int64, device=DEVICE)
    target = torch.full((2 * size,), -1, dtype=torch.int32, device=DEVICE)
    fetch_words(arrays, turn, words_W=target)

    assert target[:size].tolist() == arrays[1].tolist()
    assert (target[size:] == -1).all()


def test_turns_outlast_32_bits() -> None:
    """A server that launches a step each millisecond comes there within a month."""
    arrays = some_arrays()
    arrays[:, 0] = torch.arange(NUM_ARRAYS)
    turn = torch.full((1,), (1 << 32) + 1, dtype=torch.int64, device=DEVICE)
    target = torch.zeros(NUM_WORDS, dtype=torch.int32, device=DEVICE)
    fetch_words(arrays, turn, words_W=target)

    assert target[0].item() == ((1 << 32) + 1) % NUM_ARRAYS
    assert turn.item() == (1 << 32) + 2


def test_an_array_is_the_next_ones_until_it_is_sent() -> None:
    """A launch that fails before it has enqueued anything leaves it to the one after it, as the device does."""
    staging = Staging(EagerDevice(), some_arrays())
    first, again = staging.take(), staging.take()
    staging.sent()

    assert first is again
    assert staging.take() is not first


def test_arrays_of_launches_that_wait_are_apart() -> None:
    """Each of them has the one that is its own once those before it have been sent."""
    staging = Staging(EagerDevice(), some_arrays())
    ahead = [staging.take(num_before) for num_before in range(NUM_ARRAYS)]
    in_turn = []
    for _ in range(NUM_ARRAYS):
        in_turn.append(staging.take())
        staging.sent()

    assert len({id(words) for words in ahead}) == NUM_ARRAYS
    assert all(first is second for first, second in zip(ahead, in_turn, strict=True))


def test_an_array_is_free_when_it_was_read() -> None:
    """Not before: whoever takes it waits for the event behind the launch that reads it, once."""
    staging = Staging(EagerDevice(), some_arrays())
    events = []
    for _ in range(NUM_ARRAYS + 2):
        staging.take()
        staging.sent()
        events.append(PendingEvent())
        staging.fence(events[-1])
    staging.take()
    staging.take()

    assert [event.num_waits for event in events] == [1, 1, 1, 0, 0]


def test_an_array_without_an_event_is_waited_for_by_the_whole_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch may break off between the two."""
    device, num_waits = EagerDevice(), [0]

    def synchronize() -> None:
        num_waits[0] += 1

    monkeypatch.setattr(device, "synchronize", synchronize)
    staging = Staging(device, some_arrays()[:1])
    staging.take()
    staging.sent()
    assert num_waits == [0]
    staging.take()

    assert num_waits == [1]
