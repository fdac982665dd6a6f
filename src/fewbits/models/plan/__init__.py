"""What a training step keeps for its backward pass, so that it fits a memory budget and waits least.

`layer_cost.py` says what each kept item takes and saves, `memory_plan.py` chooses, `memory_budget.py` puts
the choice into a model and corrects it after the first step, `from_batches.py` does so in a trainer that
knows nothing of it, and `memory_ends.py` knows an allocation that failed. Imports
`models.packing` and `models.adapting`. Begin with `memory_plan.py`.
"""
