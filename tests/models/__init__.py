"""Tests of loading, packing, adapters, merging, generation and the fused decoder."""
