"""From files to token batches: rows, how a row is written for the model, which of its tokens train, packing.

In the order of the calls: `mix.py`, `sources.py` and `rows.py` read files, `examples.py` turns a row into
tokens and labels (by `chat.py` and `spans.py`; `token_store.py` holds them), `packing.py` puts examples side
by side into sequences, `step_sampler.py` says which of these a step takes, and `collator.py` makes tensors
of them. Imports the configuration and nothing else of training. Begin with `examples.py`.
"""
