"""Products as stochastic-computing hardware counts them: exactly, by lookup, and as a model on matrix units.

What the streams are is defined in `fewbits.formats.stochastic`. `codes.py` is the op on prepared
operands, and `choice.py` says which of the CUDA kernels `lookup`, `nibbles`, `many`, `bits` and, on Hopper,
`wide_bits` (with `wide_lengths`) a product takes. One row of x, as generation has it, is `rows.py`,
launched by `lookup.py`: in CUDA the kernel of `lookup.cu`, whose parts are `lookup_places.cu`,
`lookup_tables.cu` and `lookup_tiles.cu`, then that of `adding.cu`. Imports formats, `kernels.launch` and
`kernels.codec`. Begin with `matmul.py`, the public product.
"""
