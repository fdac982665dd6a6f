"""Tests of rounding with calibration text."""
