"""From a checkpoint on disk to a model whose weights are packed.

transformers builds the model; `hf_quantizer.py` is our plug-in there, and `conversion_ops.py` what it
calls for each weight, which `packing/packed.py` rounds. `streamed_loading.py` and `streamed_weights.py` read
ahead of it, `packed_filling.py` fills the layers of a packed folder, `foreign.py` reads what other libraries
packed, `gguf_model.py` reads GGUF. Imports folders, packing and stochastic. Begin with `hf_quantizer.py`.
"""
