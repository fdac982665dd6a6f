"""Tests of evaluation and of answers to many prompts."""
