"""Attention over sequences that are cut over ranks: by a ring of keys and values, or by an exchange of heads.

`shares.py` says which tokens a rank has, `blocks.py` is attention of one block with the logarithm of its sum,
`ring.py` adds up blocks whose keys and values go round, `exchange.py` gives each rank whole sequences of some
heads. Imports nothing of `fewbits.te`. Begin with `shares.py`.
"""
