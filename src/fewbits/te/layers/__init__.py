"""Modules: linears, norms, the MLP, and what they share.

`module.py` is what all share, `primary.py` weights that exist in quantised form only, `recompute.py` and
`graph.py` checkpoints of activations and CUDA graphs. Imports recipe, support, ranks, tensors, active and
products. Begin with `linear.py`.
"""
