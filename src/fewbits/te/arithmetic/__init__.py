"""What scales, codes and exponents are, in plain torch: each file is the definition of one kind of scaling.

`scaling.py` has one scale a tensor and 128 values, `microscaling.py` MXFP8, `float4.py` NVFP4, `layouts.py`
the shapes that cuBLAS wants of them. Imports formats and kernels, and nothing of `fewbits.te`. Begin with
`scaling.py`.
"""
