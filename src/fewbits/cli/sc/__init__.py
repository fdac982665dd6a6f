"""``fewbits sc``: the commands of stochastic computing, each in its file.

`commands.py` sorts them, `flags.py` has their options, `common.py` what several need. Imports all that
commands may. Begin with `commands.py`.
"""
