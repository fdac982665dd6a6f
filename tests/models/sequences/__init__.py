"""The fused decoder beside the plain one over random sequences of calls; each seed is one sequence.

`setup.py` makes two equal models, `pair.py` fuses one of them, gives both the same calls and compares;
`computing.py`, `changing.py` and `turned_into.py` are the calls. How far results may be apart is derived in
`exact.py`; which layers must run fused is said in `expected.py`, and each call of a layer is held against it;
what FP8 operands mean is defined in `float8.py`. `run.py` draws sequences, shrinks one that fails, prints it
as Python. Begin with `run.py`, then `pair.py`.
"""
