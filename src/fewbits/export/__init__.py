"""The way out: what other engines read, written through their own libraries' writers.

This room knows files and no models. It is given names, tensors one at a time, a configuration and a
tokenizer, and writes GGUF (`gguf_file`, for llama.cpp) or compressed-tensors (for vLLM and transformers).
`fewbits.models.exporting` stands above it: it takes a model apart, calls this room, reads back what was
written and proves it by logits. The packages ``gguf`` and ``compressed-tensors`` are needed only when a
function here is called.
"""
