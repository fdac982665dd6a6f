"""What goes between processes: sizes of groups, sums and gathers with gradients, random streams, one loss.

Imports nothing of `fewbits.te`. Begin with `parallel.py`; `distributed.py` is what it asks of torch,
`cross_entropy.py` the loss over a vocabulary that is cut over ranks.
"""
