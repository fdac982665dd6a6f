"""Products of many rows with packed or rounded weights, for training, and their gradients.

`matmul_packed.py` is the plain one, `lora_linear.py` has the low-rank branch beside it, `matmul_float8.py`
takes both operands in FP8, and `fake_quantize.py` is the weight of quantisation-aware training. A pair, in
`pair_inputs.py` and its kin, is a token and one of its experts. LoRA's gradients of fused layers are made in
`decoder/projection.py`; products of a few rows, as generation has them, are in `kernels.generation`. Imports
formats, `kernels.launch` and `kernels.codec`. Begin with `matmul_packed.py`.
"""
