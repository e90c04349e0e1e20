"""Tests that want a CUDA device are not even collected without one."""

import sys
from pathlib import Path

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]

if not collect_ignore_glob:
    from aserve.model.kernels import compile

    compile._PROCESSES_MAX = 1  # or each of pytest's own processes starts a dozen more

sys.path.append(str(Path(__file__).parent.parent / "model" / "kernels"))  # its builders serve both
