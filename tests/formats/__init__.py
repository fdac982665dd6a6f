"""Tests of number formats: contracts, golden vectors, other implementations."""
