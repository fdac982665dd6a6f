"""A Hugging Face model as it stands: where a family's parts are in it, its attention, what we did to it.

Nothing here computes a layer. `spec.py` finds a family's modules in a model, `generic.py` reads a spec from a
model that nobody wrote one for, `attention.py` enters by transformers' own interface. `record.py` is what a
changed model carries along, in parts such as `conversion.py`; `unwrap.py` finds the model in its wrappers.
Imports formats, families, recipes and nn. Begin with `spec.py`.
"""
