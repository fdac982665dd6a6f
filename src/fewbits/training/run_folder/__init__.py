"""The folder of a run: which files are where, whose they are while it lives, where a killed run goes on.

Imports the configuration, `training.checkpoints` and `training.ranks`. Begin with `layout.py`; `lock.py` lets
one run at a time write there, and `resume.py` chooses the checkpoint.
"""
