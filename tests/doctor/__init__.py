"""Tests of what doctor says of a machine."""
