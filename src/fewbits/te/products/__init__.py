"""A linear product of quantised operands, with its gradients.

`product.py` is its definition and its node of autograd, `units.py` the same on a GPU's 8-bit units,
`small_block_units.py` on those for MXFP8 and NVFP4, `emulated.py` on its bfloat16 units, `weight_gradient.py`
where a weight's gradient goes. Imports arithmetic and tensors. Begin with `product.py`.
"""
