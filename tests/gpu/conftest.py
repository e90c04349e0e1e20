"""Tests that want a CUDA device are not even collected without one."""

import sys
from pathlib import Path

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]

sys.path.append(str(Path(__file__).parent.parent / "model" / "kernels"))  # its builders serve both
