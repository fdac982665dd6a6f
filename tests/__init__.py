"""Tests, in the rooms of src/fewbits; what several of them need stands beside them."""
