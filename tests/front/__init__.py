"""Tests of other libraries' words."""
