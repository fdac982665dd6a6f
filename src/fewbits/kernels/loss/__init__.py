"""The output head and its loss together, a chunk of rows at a time, so that no step holds all logits.

`linear_cross_entropy.py` is what a training step uses; `linear_log_probs.py` is what preference training and
evaluation use; `rows_and_labels.py` is what both have around their ops. Imports formats, `kernels.launch`,
`kernels.codec` and `kernels.product`. Begin with `linear_cross_entropy.py`.
"""
