"""The words of other libraries, over this one: each is the same thing under another name, or a refusal.

One file for each kind: ``unsloth`` (the model classes and the patches that patch nothing), ``responses``
(training on responses only), ``sharegpt`` (columns into conversations), ``unsloth_trainer`` (TRL's trainer
with a learning rate of its own for embeddings). Begin with ``unsloth``.
"""
