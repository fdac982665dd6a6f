"""What a model family is, as data: where things are in its models, and what its layers compute with them.

`catalog.py` has one `ModelSpec` for each family, `registry.py` finds one and adds yours, `shapes.py`
turns a spec and a config.json into the shapes of a layer's weights. All that reads a family (conversion,
the fused decoder, attention, decoding, memory, ranks, export) stands above and asks these values; no
other room compares a ``model_type``. Imports formats, and neither torch nor a model nor a recipe. Begin
with `spec.py`, which defines a `ModelSpec` and its parts.
"""
