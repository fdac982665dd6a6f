"""Mixtures of experts: which expert a token goes to, the way there and back, and rows of padding.

Imports support, tensors, active and layers. Begin with `router.py`, then `permutation.py`.
"""
