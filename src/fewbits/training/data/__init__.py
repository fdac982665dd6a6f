"""From files to token batches: rows, how a row is written for the model, which of its tokens train, packing.

Imports the configuration and nothing else of training. Begin with `examples.py`, which turns a row into
tokens; `rows.py` reads the files before it, `packing.py` and `batches.py` make batches after it.
"""
