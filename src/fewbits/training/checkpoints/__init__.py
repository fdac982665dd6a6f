"""What a run can go on from: weights, optimizer and counters in folders that appear complete or not at all.

`folders.py` writes and rotates such folders, `manifest.py` says whether every byte is still what it was,
`sharded.py` and `whole.py` read and write models that ranks share. Imports `training.ranks` and the
optimizer. Begin with `folders.py`; which checkpoint a killed run takes is decided in
`training/run_folder/resume.py`.
"""
