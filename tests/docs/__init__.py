"""Tests of the documentation: code blocks, links, and tables held to the code."""
