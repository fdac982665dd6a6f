"""Adapters and their base written as one ordinary model, 16-bit or packed, and checked before it counts.

`merge.py` is the way in, `merger.py` does one merge tensor by tensor, `experts.py` one with experts,
`branches.py` reads from the modules what an adapter adds. Imports folders, loading and packing. Begin
with `merge.py`.
"""
