"""``fewbits bench train``: training steps, ours and the installed peers', each checked first."""
