"""The fused decoder layer: its two halves, each one autograd node over packed weights and LoRA branches.

`fuse.py` puts it into a model. `parts.py` takes a layer's modules apart or says why it stays as it is
(`limits.py`, `guard.py`); `attention_half.py` and `mlp_half.py` compute what differs between the halves,
`both_halves.py` what they share, with `projection.py` for linears and their branches, `products.py` for the
products by weights, `scales.py` for FP8, `keep.py` and `offload.py` for what waits for the backward pass, and
`loss.py` for a loss without logits. `proof.py` compares with the layer's own forward before it is trusted.
Imports all floors below models. Begin with `fuse.py`, then `both_halves.py` and `mlp_half.py`.
"""
