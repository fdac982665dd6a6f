"""What a packed model's folder says to those who open it without fewbits.

transformers reads a folder whose ``quant_method`` it does not know as if nothing were quantised: it warns,
finds no weight of the packed linears and leaves them at random values. Every version from 5.0 on, however,
reads ``transformers_weights`` in config.json, the name of the weight file, and refuses a name that is no
safetensors file, quoting it in its ValueError, for folders and hub ids alike. A packed folder therefore has
a sentence there, which `FewbitsQuantizer` takes away before transformers looks; and a README says the same
at length.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MARK = "transformers_weights"
CLOSED = (
    "packed by fewbits, which transformers alone cannot read: call fewbits.register() before "
    "from_pretrained, or load it with fewbits.FastLanguageModel.from_pretrained"
)
_TITLE = "# Packed by fewbits"
_README = f"""{_TITLE}

The linear layers of this model are stored in few bits; `quantization_config` in `config.json` names the
recipe. transformers alone cannot read them: it refuses this folder, by the entry `{MARK}` of
`config.json`. Do not remove that entry, nor put the original model's `config.json` here: the packed layers
would then be left at random values, with a warning only.

With fewbits installed:

```python
from fewbits import FastLanguageModel

model, tokenizer = FastLanguageModel.from_pretrained("this/folder")
```

or through the classes of transformers (and of what is built on them):

```python
import fewbits
from transformers import AutoModelForCausalLM

fewbits.register()
model = AutoModelForCausalLM.from_pretrained("this/folder")
```

`model.dequantize()` then gives an ordinary model, which any library reads once it is saved.
"""


def close_folder(folder: Path, published: Path | None = None) -> None:
    """Write the sentence into config.json, and the README.

    Args:
        folder: a packed model's folder, complete but for these.
        published: where its files will lie among others that stay; a README.md there is not replaced.
    """
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config[MARK] = CLOSED
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    readme = folder / "README.md"
    if readme.is_file():
        text = readme.read_text(encoding="utf-8", errors="replace")
        if _TITLE not in text:
            readme.write_text(f"{text.rstrip()}\n\n{_README}", encoding="utf-8")
    elif published is None or not (published / "README.md").exists():
        readme.write_text(_README, encoding="utf-8")


def open_config(config: Any) -> Any:
    """The same config (an object of transformers), free of the sentence: its weights can be read now."""
    if getattr(config, MARK, None) == CLOSED:
        delattr(config, MARK)
    return config
