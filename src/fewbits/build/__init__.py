"""Source builds within the memory there really is. Standard library only, so that it works without torch."""

from fewbits.build.budget import Budget, Limit, parse_bytes, read_budget

__all__ = ["Budget", "Limit", "parse_bytes", "read_budget"]
