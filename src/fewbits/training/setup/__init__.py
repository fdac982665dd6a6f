"""What a run needs before its first step, and what watches it: model, Trainer, callbacks, signals.

`model_and_trainer.py` makes them from the configuration, on one process; `distribute.py` on several. Imports
the other rooms of training but `step`, `report` and `preferences`. Begin with `model_and_trainer.py`.
"""
