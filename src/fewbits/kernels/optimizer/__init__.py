"""The optimizer's step as a kernel: AdamW with moments of 8 bits, all tensors of a group in one launch.

Imports `kernels.launch` only. Begin with `adamw.py`; the torch optimizer around it is
`fewbits.training.optimizer`.
"""
