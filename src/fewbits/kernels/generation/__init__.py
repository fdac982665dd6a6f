"""Kernels for one new token a sequence: products of a few rows with packed weights, attention over the cache.

No gradients: generation has none. Imports formats, `kernels.launch` and `kernels.decoder` (whose activations
a product can end with). Begin with `few_rows.py`; `cut.py` says how a product is divided among blocks.
"""
