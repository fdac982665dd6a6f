"""The build runner: source builds within the memory there really is, what ``fewbits build`` does.

A package of its own: it imports the standard library and nothing of fewbits, so that it works without
torch. The wheel of fewbits holds it. This module's own names are those of the memory budget. Begin with
`runner.py`, which runs one build under `controller.py`.
"""

from fewjobs.budget import Budget, Limit, parse_bytes, read_budget

__all__ = ["Budget", "Limit", "parse_bytes", "read_budget"]
