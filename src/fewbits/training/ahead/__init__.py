"""What can be said of a run before it begins: a dry run, its first tokens, its memory on a GPU.

Nothing here trains or writes into a run folder. Imports `fewbits.training.run` and the rooms below it. Begin
with `dry_run.py`.
"""
