"""Fitting a model to few bits with data: smoothing and clipping, stream lengths, quantisation-aware training.

`calibrate.py` measures what goes into each linear; `stochastic.py` and `stochastic_lengths.py` choose the
settings of stochastic products; `qat.py` prepares a model for training in its rounded weights, and packs it;
`recovery.py` distils the plain model into the scales and norms of a packed one.
Imports nothing else of training. Begin with `calibrate.py`, or `qat.py`.
"""
