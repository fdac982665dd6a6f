"""``fewbits bench train``: whole training steps of fewbits and of other installed libraries, timed alike.

`configurations.py` lists what is compared, `builders.py` makes each model, `parity.py` compares its gradients
with a plain reference before anything is timed, `worker.py` times it in a process of its own, and
`schedule.py` lets configurations take turns. Imports what `fewbits.bench` may. Begin with `command.py`.
"""
