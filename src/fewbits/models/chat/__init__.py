"""Chat templates: by name, tried safely, and their markers as trained tokens.

`named_templates.py` knows how families write a conversation, `template.py` tries a model's own template
in a process that can be stopped, `template_tokens.py` adds its markers. Imports nothing of the other
rooms of models. Begin with `named_templates.py`.
"""
