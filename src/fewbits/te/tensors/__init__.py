"""Quantisers, and the tensors that they make: which a parameter, a checkpoint and a product take.

`operand.py` is a matrix as products see it, `quantized_tensor.py` one that torch takes for a real tensor,
`roles.py` the words of custom recipes, `safe.py` what ``torch.load`` may build of them.
Imports recipe, support, arithmetic and ranks. Begin with `quantizers.py`.
"""
