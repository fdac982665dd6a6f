"""Runs of the preference methods (DPO, KTO, GRPO and others): TRL's trainers, our data and run folder.

Imports the rooms of training below it, as `fewbits.training.run` does, which calls it. Begin with `run.py`.
"""
