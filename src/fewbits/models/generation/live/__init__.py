"""Generating many texts in one batch: one that has ended leaves, and the next joins, between two tokens.

Other libraries say continuous batching. `slots.py` and `step_slots.py` hold the cache of each place in
the batch (by the model's forward, or by the kernels of decoding), `slot_layers.py` one layer's keys and
values there, `prompts.py` reads the texts that wait,
`rows.py` says what each asks for, and `plan.py` how many fit the memory. Imports what `fewbits.models`
may. Begin with `batch.py`, the loop.
"""
