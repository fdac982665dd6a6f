"""Attention: its definition, masks, positions, the caches of inference, and the module around it.

`dot_product.py` is softmax(q k^T) v, `rounded.py` the same with operands in FP8, `over_ranks.py` of sequences
that ranks share, `multi_head_attention.py` the module. Imports support, ranks, context, tensors, active and
layers. Begin with `dot_product.py`.
"""

from __future__ import annotations

from fewbits.te.attention.dot_product import DotProductAttention as DotProductAttention
