"""``sampler = host``: tokens are sampled in a thread of their own while the device goes on with other rows.

The same code on the same snapshot of the same table, so the tokens are those of the device's sampler. They come back to
the device in the next plan's ``token_writes``.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from aserve.device.thread import DeviceThread
from aserve.model.sampler import SampledTokens, Sampler, SamplingRows


class HostSampler:
    """A sampler and its thread. Results come through callbacks, in the order of the calls."""

    def __init__(self, vocab_size: int) -> None:
        self._sampler = Sampler(vocab_size)
        # One thread: the forward's threads have the cores, and their number is kept per calling thread.
        self._thread = DeviceThread("aserve-sampler", setup=lambda: torch.set_num_threads(1))

    def submit(
        self,
        logits_RV: Tensor,
        rows: SamplingRows,
        logprobs_k: int,
        sampled: Callable[[SampledTokens], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Sample and call ``sampled``, or ``failed`` with whatever either raised, in the sampler's thread.

        The logits are the sampler's from now on: nobody else may read or write them.
        """

        def job() -> None:
            try:
                sampled(self._sampler.sample(logits_RV, rows, logprobs_k))
            except BaseException as error:
                failed(error)

        self._thread.submit(job)

    async def aclose(self) -> None:
        """Sample what is queued, then end the thread."""
        await self._thread.aclose()
