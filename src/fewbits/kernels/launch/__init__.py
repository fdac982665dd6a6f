"""What every kernel needs to be started: Triton if it is there, grids, tiles, CUDA C++ compiled at run time.

No arithmetic of an operation stands here. `nvrtc.py` compiles the ``.cu`` files of all rooms, and
`tuning.py` says which tile a GPU takes. Imports formats and nothing of the other rooms of kernels. Begin
with `jit.py`.
"""
