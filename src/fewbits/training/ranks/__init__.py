"""Several processes, one model: who they are, how weights are shared, and how gradients travel in few bits.

`processes.py` says who the ranks are, `meeting.py` how they find each other, `watch.py` that none waits for a
dead one. A model is copied (`ddp.py`), sliced (`fsdp.py`) or shared layer by layer (`tensor_parallel.py`).
What gradients look like on the way is in `communication.py`. Imports nothing else of training. Begin with
`processes.py`.
"""
