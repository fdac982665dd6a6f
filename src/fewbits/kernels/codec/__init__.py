"""Dense values to packed ones and back: weights in any format, FP8 operands, gradients as messages.

What the numbers of a format are is defined in `fewbits.formats`; here is how a GPU makes them. Imports
formats and `kernels.launch`. Begin with `dequantize.py`; the GPU kernel that decodes NF4 is in
`dequantize_triton.py`.
"""
