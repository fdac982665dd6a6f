"""``fewbits demo``: a small model learns a task in a minute, and is saved and read back.

Imports everything but `bench` and `cli`. Begin with `run.py`; `task.py` makes the data.
"""
