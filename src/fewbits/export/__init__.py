"""The way out: what other engines read, written through their own libraries' writers.

This room knows files and no models: given names, tensors one at a time, a configuration and a tokenizer,
it writes GGUF (`gguf_file.py`, for llama.cpp) or compressed-tensors (`compressed.py`, for vLLM and
transformers). `fewbits.models.writing.exporting` stands above it: it takes a model apart, calls this room,
reads back what was written and proves it by logits. Imports formats and families; the packages ``gguf`` and
``compressed-tensors`` only when a function here is called. Begin with `methods.py`.
"""
