"""Kernels run on the GPU where there is one, else on the CPU in Triton's interpreter; without Triton, not at all."""

import importlib.util
import os

import torch

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before any of them is imported
    if not collect_ignore_glob:
        from triton.runtime import interpreter

        patch_tensor = interpreter._patch_lang_tensor

        def patch_tensor_for_numpy(tensor, scope):
            """NumPy 2.4 makes no int of an array of one element, as Triton 3.6's interpreter has it do for ranges."""
            patch_tensor(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

        interpreter._patch_lang_tensor = patch_tensor_for_numpy
