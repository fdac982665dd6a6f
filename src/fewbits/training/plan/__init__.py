"""How a run meets the end of memory, and how ranks share a model.

`out_of_memory.py` repeats a step under a smaller plan (`fewbits.models.plan` makes plans), and `parallel.py`
chooses how ranks share a model. Imports `training.data` and `training.ranks`. Begin with `out_of_memory.py`.
"""
