"""A checkpoint becomes a model in few bits, gets adapters, generates, and is written again.

Rooms, each above those before it: `folders` (what stands on disk), `packing` (a recipe put into a
model), `stochastic`, `loading` (transformers builds the model, and `loading/hf_quantizer.py` packs each
weight), `merging`, `adapting` (LoRA), `generation`, `writing` (files for other engines); `chat` stands
alone. `fast.py` has the words of Unsloth's scripts, `undo.py` takes out what was put in. Imports host,
decoder, nn, kernels and what lies below. Begin with `fast.py`.
"""
