"""Rounding weights so that layers compute what they did before, measured on a text: GPTQ and AWQ.

`pipeline.py` goes through a checkpoint layer by layer and writes a packed one; `gptq.py` and `awq.py` are the
two methods, `grids.py` the scales they round to, `budget.py` gives each linear a format under a mean number
of bits, and `quality.py` measures what was lost. Imports the models and everything below them. Begin with
`pipeline.py`.
"""
