"""A recipe put into a model in memory: linears, experts and the head become packed ones, with a receipt.

`convert.py` walks over the model, `packed.py` makes and describes the packed layers, `experts.py` and
`packed_head.py` do so for experts and the head, `split_experts.py` makes experts linears of their own,
`gpu_fallbacks.py` says what no kernel computes. Imports folders. Begin with `convert.py`.
"""
