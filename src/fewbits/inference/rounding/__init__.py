"""Rounding weights so that layers compute what they did before, measured on a text.

`pipeline.py` goes through a checkpoint layer by layer and writes a packed one, `layer_rounding.py` rounds one
layer by the steps that `methods.py` reads from a method's name: `awq.py` (scales folded between layers),
`gptq.py`, `learned.py` (codes and scales trained). `grids.py` has the scales that they round to, `budget.py`
gives each linear a format under a mean number of bits, `quality.py` measures what was lost, `kept_work.py`
keeps what is done. Imports the models and everything below them. Begin with `pipeline.py`.
"""
