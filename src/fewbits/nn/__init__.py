"""Modules: linears that hold packed weights, LoRA layers, norms, attention, the loss, stochastic layers.

A module takes formats as values; none knows a recipe or a model's family. Imports formats and kernels. Begin
with `linear.py` (`QuantizedLinear`), then `lora.py`.
"""
