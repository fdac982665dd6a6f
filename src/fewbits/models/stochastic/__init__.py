"""Stochastic computing in a Hugging Face model: put in, saved, found again, switched.

`in_model.py` checks a `StochasticConfig` against a model and puts it in, `attention.py` does so for
attention, `sharing.py` finds linears that share an input, `switch.py` runs many configurations in turn,
`query_key_scales.py` and `rotations.py` fold into weights what counts better. Imports packing. Begin with
`in_model.py`.
"""
