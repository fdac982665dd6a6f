"""Linears and attention whose products are computed by stochastic computing.

`linear.py` has the modules, `product.py` the autograd functions, `attention.py` the products of
attention, `group.py` linears with one input, `qat.py` training through them. Imports formats, kernels and
recipes. Begin with `linear.py`.
"""
