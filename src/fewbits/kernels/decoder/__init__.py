"""What stands between a decoder layer's products: norms, rotary positions, gated activations, LoRA branches.

Each file fuses several elementwise steps into one pass over memory, forward and backward. Imports
`kernels.launch` and `kernels.codec`. Begin with `rmsnorm.py`; the layer that calls all of them is
`fewbits.decoder.attention_half` and `fewbits.decoder.mlp_half`.
"""
