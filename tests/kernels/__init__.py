"""Tests of kernels beside their definitions, by the interpreter, emulated, and on GPUs."""
