"""`Reading`: what the libraries below raise while a model is read becomes one sentence of ours.

They raise whatever their authors thought of (tokenizers a bare ``Exception``, config classes errors of their
own, a damaged number ZeroDivisionError), so everything is turned here; the cause stays attached.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from safetensors import SafetensorError

from fewbits.errors import BadCheckpoint, BadInput, FewbitsError, Unsupported

_MOST_CHARACTERS = 300


class Reading:
    """A context manager around the reading of ``where``, a folder or a hub id.

    Args:
        where: the folder or id.
        tokenizer: whether its tokenizer is what is read.

    Raises:
        BadCheckpoint, BadInput, Unsupported: in place of any exception that is not ours already; a GPU's
            full memory and interruptions pass as they are.
    """

    def __init__(self, where: str | Path, *, tokenizer: bool = False) -> None:
        self.where, self.tokenizer = where, tokenizer

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ours = isinstance(error, FewbitsError) or type(error).__name__ == "OutOfMemoryError"
        if isinstance(error, Exception) and not ours:
            raise self._told(error) from error

    def _told(self, error: Exception) -> FewbitsError:
        reason = first_line(error)
        if self.tokenizer:
            return BadInput(
                f"{self.where} has no tokenizer that transformers can read ({reason}); put the model's "
                "tokenizer.json and tokenizer_config.json there."
            )
        if isinstance(error, SafetensorError):
            return BadCheckpoint(
                f"{self.where} has a truncated or corrupt safetensors file ({reason}); download it again."
            )
        if isinstance(error, MemoryError):
            return Unsupported(f"{self.where} needs more memory than there is here; take a smaller model.")
        if isinstance(error, OSError):
            if Path(self.where).is_dir():
                return BadCheckpoint(f"{self.where} cannot be read ({reason}); check its files.")
            return BadInput(
                f"{str(self.where)!r} is neither a folder here nor a model that could be had from the hub "
                f"({reason}); check the name, or give the path of a folder."
            )
        return BadCheckpoint(
            f"{self.where} could not be loaded ({reason}); check its files, or load it with "
            "transformers alone."
        )


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, cut where it is long; its class where it has none."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, (KeyError, IndexError, AttributeError, ArithmeticError, RecursionError)) or not line:
        line = f"{type(error).__name__}: {line}" if line else type(error).__name__
    return line if len(line) <= _MOST_CHARACTERS else f"{line[: _MOST_CHARACTERS - 3]}..."
