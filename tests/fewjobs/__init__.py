"""Tests of the build runner."""
