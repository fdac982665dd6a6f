"""Using a model: generation, evaluation, export of a folder, and what stochastic products do to perplexity.

Imports the models and everything below them. Begin with `decode.py`, or `generate.py` for the command line's
words.
"""
