"""Folders of models: what stands in one, and how one is written whole or not at all.

`checkpoint.py` looks at a checkpoint before it is loaded, `config_check.py` holds its config.json against
its weights, `whole_folder.py` writes a folder beside the old one and swaps them, `records.py` leaves word of
what was written, `one_writer.py` lets one process write at a time. Imports nothing of the other rooms of
models. Begin with `checkpoint.py`.
"""
