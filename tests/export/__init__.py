"""Tests of other engines' files, read back by their own libraries."""
