"""LoRA adapters on a packed model: put there, read from a folder, changed, described, predicted.

`adapters.py` makes a true PeftModel, `files.py` reads and compares adapter folders, `words.py` has vLLM's
words, `quantization_error.py` begins adapters as what packing took away. Imports folders, loading,
packing and merging. Begin with `adapters.py`.
"""
