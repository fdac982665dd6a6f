"""Stochastic computing evaluated: whole texts, candidates side by side, swaps, energy, and errors.

`evaluation.py` measures a text layer by layer, `screen.py` many tables in one go (`board.py` is the
leaderboard on disk), `swap.py` each operator at each length, `energy.py` prices an operation,
`receipt.py` proves that every product ran, `tasks.py` does so for lm-eval's tasks. Imports models and
nn. Begin with `evaluation.py`.
"""
