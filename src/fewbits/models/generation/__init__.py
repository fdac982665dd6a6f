"""``model.generate`` at the speed of our own decode step: caches, prompts, batches, guesses.

`loop.py` decodes where `calls.py` says that the call allows it, by `step.py`, one token as few kernels in
a CUDA graph. `packed_cache.py` is transformers' cache in few bits, `live/` holds batches whose sequences
come and go, `speculation.py` verifies guesses. Imports folders, packing and adapting. Begin with
`loop.py`.
"""
