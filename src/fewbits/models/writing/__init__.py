"""A model in memory on its way to the files of other engines, and to the hub.

`exporting.py` has ``save_pretrained_gguf`` and its kind, `exported_weights.py` gives merged weights one
at a time, `proof.py` reads the export back and compares, `hub.py` uploads with a `model_card.py`. Imports
folders, packing, adapting and merging. Begin with `exporting.py`.
"""
