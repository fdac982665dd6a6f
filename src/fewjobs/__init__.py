"""The build runner: source builds within the memory there really is, what ``fewbits build`` does.

A package of its own: it imports the standard library and nothing of fewbits, so that it works without torch.
The wheel of fewbits holds it. Begin with `fewjobs.runner.run_build`, which runs one build under
`fewjobs.controller`; this module's own names are those of the memory budget.
"""

from fewjobs.budget import Budget, Limit, parse_bytes, read_budget

__all__ = ["Budget", "Limit", "parse_bytes", "read_budget"]
