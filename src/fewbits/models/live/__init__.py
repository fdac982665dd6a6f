"""Texts of different lengths that are made together and come and go between two tokens."""
