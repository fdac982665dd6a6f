"""Tests of training: data, steps, several processes, checkpoints, resuming."""
