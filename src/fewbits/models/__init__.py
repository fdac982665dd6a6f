"""A checkpoint becomes a model in few bits, gets adapters, and is written again.

Loading, in the order of the calls: `fast.py` has the words of Unsloth's scripts; transformers asks
`hf_quantizer.py` what to do with each weight and calls `conversion_ops.py` for it; `packed.py` packs it
by the rows of its format. A model that is in memory already: `in_memory.py` calls `convert.py`, which
chooses and replaces the modules. `adapters.py` adds LoRA, `decode_generate.py` writes text, `merge.py`
and `exporting.py` write folders. What is known of the host's model is in `fewbits.host`, the fused layer
in `fewbits.decoder`. Imports all rooms from formats to decoder, and export. Begin with `convert.py`, or
with `fast.py` for loading.
"""
