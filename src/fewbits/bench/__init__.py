"""``fewbits bench``: what an operation or a training step takes, each row with its conditions.

`cases.py` lists the operations, `measure.py` is the protocol, `record.py` the row, `train/` whole steps
beside other libraries. Imports everything but inference, demo and cli. Begin with `cases.py`.
"""
