"""A checkpoint becomes a model in few bits, gets adapters, and is written again.

`fast.py` has the words of Unsloth's scripts, `hf_quantizer.py` packs each weight while transformers loads it,
`convert.py` puts a recipe into a model in memory, `adapters.py` adds LoRA, `merge.py` and `exporting.py`
write folders. What is known of the host's model is in `fewbits.host`, the fused layer in `fewbits.decoder`.
Begin with `convert.py`.
"""
