"""Tests of Transformer Engine's names."""
