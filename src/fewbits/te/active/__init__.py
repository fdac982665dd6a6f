"""The recipe that holds now, and what it remembers: the only state of `fewbits.te`.

`numerics.py` has the contexts that set a recipe, `operands.py` its quantisers for a module, `delayed.py`
scales and histories of delayed scaling, `extra_state.py` their bytes in checkpoints, `global_state.py` what
frameworks ask. Imports recipe, support, arithmetic, ranks and tensors. Begin with `numerics.py`.
"""
