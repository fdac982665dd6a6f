"""Tests of the benchmarks: cases, checks and what they record."""
