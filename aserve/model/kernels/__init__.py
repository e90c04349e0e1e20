"""Triton kernels of the CUDA path, a file a family; what each computes in plain torch is in ``reference.py``.

Wrappers allocate nothing, look at no value on the device and launch a grid that depends on shapes alone, so that every
one of them can be captured in a CUDA graph. With TRITON_INTERPRET=1 set before the import they run on a CPU.
"""
