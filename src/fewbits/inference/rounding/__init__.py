"""Rounding weights by what the layers compute on a text: GPTQ, AWQ, from a file of rows to a folder."""
