"""One training run, from a configuration to a folder with a model and a report.

`config.py` has every choice of a run, `run.py` is the run from beginning to end, `optimizer.py` is AdamW
in few bits. The rooms: `data` (rows to token batches), `setup` (model, Trainer and callbacks), `step`
(one optimizer step), `plan` (what is kept for the backward pass), `ranks` (several processes),
`checkpoints`, `run_folder`, `report`, `preferences` (DPO and others, by TRL), `ahead` (what is known of a
run before it begins) and `calibration` (fitting a model to few bits). Imports models, inference and all
below them; a room's own sign says which other rooms it may. Begin with `run.py`.
"""
