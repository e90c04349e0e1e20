"""The arrays that plans are written into on their way to the device."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent))

from cuda_builders import EagerDevice

from aserve.model.cuda_pinned import Staging

pytestmark = pytest.mark.torch

NUM_WORDS = 1_000  # no power of two, of which the copies' sizes are


class PendingEvent:
    """Passes when it is waited for."""

    def __init__(self) -> None:
        self.num_waits = 0

    def query(self) -> bool:
        return self.num_waits > 0

    def synchronize(self) -> None:
        self.num_waits += 1


@pytest.mark.parametrize("num_words", [1, 255, 256, 257, 512, 999, NUM_WORDS])
def test_what_was_written_arrives(num_words: int) -> None:
    """All of it, from the array that was taken last; of a small plan not the whole array."""
    target = torch.full((NUM_WORDS,), -1, dtype=torch.int32)
    staging = Staging(EagerDevice(), 2, target)
    for turn in range(3):
        staging.take()[:num_words] = range(turn, turn + num_words)
        staging.send(num_words)
        staging.fence(PendingEvent())

        assert target[:num_words].tolist() == list(range(turn, turn + num_words))
        assert (target[max(256, 2 * num_words) :] == -1).all()


def test_an_array_is_free_when_its_copy_was_made() -> None:
    """Not before: whoever takes it waits for the event behind the copy, once."""
    staging = Staging(EagerDevice(), 2, torch.zeros(NUM_WORDS, dtype=torch.int32))
    events = []
    for _ in range(5):
        staging.take()
        staging.send(8)
        events.append(PendingEvent())
        staging.fence(events[-1])

    assert [event.num_waits for event in events] == [1, 1, 1, 0, 0]


def test_a_copy_without_an_event_is_waited_for_by_the_whole_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch may break off between the two."""
    device, num_waits = EagerDevice(), [0]

    def synchronize() -> None:
        num_waits[0] += 1

    monkeypatch.setattr(device, "synchronize", synchronize)
    staging = Staging(device, 1, torch.zeros(NUM_WORDS, dtype=torch.int32))
    staging.take()
    staging.send(8)
    assert num_waits == [0]
    staging.take()

    assert num_waits == [1]
