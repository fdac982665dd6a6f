"""The words of other libraries, over this one: each is the same thing under another name, or a refusal.

One file for each kind: `unsloth.py` (the model classes and the patches that patch nothing),
`responses.py` (training on responses only), `sharegpt.py` (columns into conversations),
`unsloth_trainer.py` (TRL's trainer with a learning rate of its own for embeddings). Imports models; TRL
when a name of it is asked for. Begin with `unsloth.py`.
"""
