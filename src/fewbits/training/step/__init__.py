"""One optimizer step: the host Trainer made exact, the step as a CUDA graph, the stop at a bad number.

Imports `training.data`, `training.ranks`, `training.plan` and `training.checkpoints`. Begin with
`trainer.py`.
"""
