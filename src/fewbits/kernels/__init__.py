"""How numbers are computed: one operation a file, its definition in plain torch first, then its kernels.

A room holds one kind of operation. The Triton kernels of ``x.py`` stand beside it in ``x_triton.py``, its
CUDA kernel in ``x.cu``, launched by ``x_cuda.py``. docs/glossary.md explains warp, lane, bank, tensor
core and floor. Imports formats; between rooms imports point down:
    launch <- codec <- product <- loss          codec <- decoder <- generation
    launch <- optimizer                         codec <- stochastic
Begin with `codec/dequantize.py` (packed to dense), then `product/matmul_packed.py`, which uses it.
"""
