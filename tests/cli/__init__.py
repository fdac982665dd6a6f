"""Tests of the command line, each command as a user calls it."""
