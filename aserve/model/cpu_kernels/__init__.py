"""Fused steps for the CPU, compiled by numba at first use and kept on disk. Importing the package compiles nothing."""
