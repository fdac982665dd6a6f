"""What a model family is, as data: where things are in its models, and what its layers compute with them.

Begin with `fewbits.families.spec` (one `ModelSpec` and its parts), then `fewbits.families.catalog` (one spec
for each family) and `fewbits.families.registry` (finding one, and adding your own). `fewbits.families.shapes`
turns a spec and a config.json into the shapes of a layer's weights.

Nothing here imports torch, a model or a recipe; all that reads a family (conversion, the fused decoder,
attention, decoding, memory, ranks, export) stands above and asks these values. No other room compares a
``model_type``.
"""
