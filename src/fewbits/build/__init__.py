"""Source builds within the memory there really is. Standard library only, so that it works without torch.

`fewbits.build.runner.run_build` runs one; this module's own names are those of the budget.
"""

from fewbits.build.budget import Budget, Limit, parse_bytes, read_budget

__all__ = ["Budget", "Limit", "parse_bytes", "read_budget"]
