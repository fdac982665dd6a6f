"""What a training step keeps for its backward pass, so that it fits a memory budget and waits least.

`layer_cost.py` says what each kept item takes and saves, `memory_plan.py` chooses, `memory_budget.py` puts
the choice into a model and corrects it after the first step, `out_of_memory.py` repeats a step under a
smaller plan, and `parallel.py` chooses how ranks share a model. Imports `training.data` and `training.ranks`.
Begin with `memory_plan.py`.
"""
