"""``push_to_hub``, ``push_to_hub_merged``, ``push_to_hub_gguf``: a model to the hub, in one commit.

What can be refused is refused before any work: no network asked for, a name that is none, nobody logged in.
Then the folder is written as the method of the same name without a hub writes it, beside nothing else, and
all of its files go up in one commit of huggingface_hub: the repository has all of them, or none.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.errors import BadInput, Unsupported
from fewbits.host.conversion import conversion_of
from fewbits.host.unwrap import unwrap
from fewbits.models.folders.checkpoint import ADAPTER_CONFIG
from fewbits.models.folders.folder_manifest import FILE as MANIFEST
from fewbits.models.folders.folder_manifest import check_folder
from fewbits.models.writing.engine_folder import save_pretrained_merged
from fewbits.models.writing.exporting import save_pretrained_gguf
from fewbits.models.writing.model_card import Card, is_hub_name

if TYPE_CHECKING:
    from torch import nn

_CARD = "README.md"
_HOW = ("token", "private", "revision", "create_pr", "commit_message", "commit_description")
_SAID = ("base_model", "tags", "datasets")


@dataclass(frozen=True)
class Upload:
    """Where something goes, and how.

    Attributes:
        repo_id: "owner/name" on the hub, or a name of one's own.
        token: of the hub; None: the one that `hf auth login` has left.
        private: whether a new repository is; None: as its owner's settings say.
        revision: a branch; None: main.
        create_pr: offer the commit as a pull request.
        commit_message: its title; None: one that says what goes up.
        commit_description: its body.
        base_model: an adapter's base by its name on the hub, in place of a folder here; None: as it says.
        tags: more tags of the card.
        datasets: data sets on the hub that the card names.
    """

    repo_id: str
    token: str | bool | None = None
    private: bool | None = None
    revision: str | None = None
    create_pr: bool = False
    commit_message: str | None = None
    commit_description: str | None = None
    base_model: str | None = None
    tags: tuple[str, ...] = field(default=())
    datasets: tuple[str, ...] = field(default=())

    def check(self) -> None:
        """Refuse what cannot go up, before any work.

        Raises:
            BadInput: the repository's or the base's name is none, or nobody is logged in.
            Unsupported: the hub is not to be asked.
        """
        from huggingface_hub import constants, get_token
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils._validators import validate_repo_id

        try:
            validate_repo_id(self.repo_id)
        except HFValidationError as error:
            raise BadInput(
                f"{self.repo_id!r} is no name of a repository on the hub; write it as owner/name, of letters,"
                " digits, '-', '_' and '.'."
            ) from error
        if self.base_model is not None and not is_hub_name(self.base_model):
            raise BadInput(f"base_model is {self.base_model!r}; name it as on the hub, as owner/name.")
        if constants.is_offline_mode():
            raise Unsupported(
                f"{self.repo_id} cannot be uploaded while HF_HUB_OFFLINE is set; unset it, or save to a"
                " folder"
                " and push that later with `fewbits push`."
            )
        if self.token is False or (self.token in (None, True, "") and get_token() is None):
            raise BadInput(
                f"you are not logged in to the Hub, and {self.repo_id} needs that; run `hf auth login`, or"
                " pass a token."
            )


def upload_of(repo_id: str, options: dict[str, Any]) -> Upload:
    """Where to, from a call's options, of which those of an upload are taken out; checked."""
    fields = {name: options.pop(name) for name in (*_HOW, *_SAID) if name in options}
    for name in ("tags", "datasets"):
        value = fields.get(name)
        fields[name] = (value,) if isinstance(value, str) else tuple(value or ())
    upload = Upload(str(repo_id), **fields)
    upload.check()
    return upload


def push_to_hub(model: Any, repo_id: str, tokenizer: Any = None, **options: Any) -> str:
    """Upload an adapter, or a model as it is stored (packed or not), with a card.

    Args:
        model: what FastLanguageModel or get_peft_model returned.
        repo_id: "owner/name", or a name of one's own; made where there is none.
        tokenizer: goes along; None: the one that the model was loaded with.
        options: of `Upload`; others are those of ``save_pretrained``.

    Returns:
        The commit's address.

    Raises:
        BadInput, Unsupported: what `Upload.check` refuses; an adapter over a folder without ``base_model``.
    """
    upload = upload_of(repo_id, options)
    is_adapter = hasattr(model, "peft_config")
    if is_adapter:
        _check_base(str(model.active_peft_config.base_model_name_or_path or ""), upload)
    tokenizer = tokenizer if tokenizer is not None else _tokenizer_of(model)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model.save_pretrained(str(folder), **options)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))
        kind = "adapter" if is_adapter else "packed" if conversion_of(unwrap(model)) else "plain"
        return push_folder(folder, card_of(model, kind), upload)


def push_to_hub_merged(
    model: nn.Module, repo_id: str, tokenizer: Any = None, save_method: str = "merged_16bit", **options: Any
) -> str:
    """Upload base and adapter as one model, with a card.

    Args:
        model: as for `save_pretrained_merged`.
        repo_id: "owner/name", or a name of one's own; made where there is none.
        tokenizer: as there.
        save_method: as there; "lora" uploads the adapter alone.
        options: of `Upload`; others are that function's.

    Returns:
        The commit's address.

    Raises:
        BadInput, Unsupported: what `Upload.check` refuses, before any work; and what that function does.
    """
    if save_method == "lora":
        return push_to_hub(model, repo_id, tokenizer, **options)
    upload = upload_of(repo_id, options)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "merged"
        save_pretrained_merged(model, folder, tokenizer, save_method, **options)
        kind = "merged" if save_method == "merged_16bit" else "packed"
        return push_folder(folder, card_of(model, kind), upload)


def push_to_hub_gguf(
    model: nn.Module, repo_id: str, tokenizer: Any = None, quantization_method: Any = "q8_0", **options: Any
) -> str:
    """Upload GGUF files of base and adapter as one model, with a card.

    Args:
        model: as for `save_pretrained_gguf`.
        repo_id: "owner/name", or a name of one's own; made where there is none.
        tokenizer: as there.
        quantization_method: as there; a list makes a file of each.
        options: of `Upload`; others are that function's.

    Returns:
        The commit's address.

    Raises:
        BadInput, Unsupported: what `Upload.check` refuses, before any work; and what that function does.
    """
    upload = upload_of(repo_id, options)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "gguf"
        save_pretrained_gguf(model, folder, tokenizer, quantization_method, **options)
        return push_folder(folder, card_of(model, "gguf"), upload)


def card_of(model: nn.Module, kind: str) -> Card:
    """What a model in memory tells of itself."""
    base = unwrap(model)
    conversion = conversion_of(base)
    config = getattr(model, "active_peft_config", None)
    settings = None
    if config is not None:
        targets = config.target_modules
        named = targets if isinstance(targets, str) else ", ".join(sorted(targets or ()))
        settings = {"rank": config.r, "alpha": config.lora_alpha, "adapted": named}
    return Card(
        kind=kind,
        base_model=str(getattr(base.config, "name_or_path", "") or ""),
        recipe=None if conversion is None else conversion.recipe.name,
        settings=settings,
        receipt="" if conversion is None or kind in ("merged", "gguf") else str(conversion.receipt),
    )


def push_folder(folder: Path, card: Card, upload: Upload) -> str:
    """Upload all files of a folder in one commit, with a card in place of its README; it stays as it is.

    Args:
        folder: a model, an adapter or an export, complete.
        card: what to say of it.
        upload: where to; checked.

    Returns:
        The commit's address.

    Raises:
        BadInput: the hub refuses it, with its reason; an adapter over a folder without a base's name.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError

    if (folder / MANIFEST).is_file():
        check_folder(folder)
    changed: dict[str, bytes] = {}
    if (folder / ADAPTER_CONFIG).is_file():
        changed |= _base_named(folder, upload)
    card = _said_more(card, upload)
    changed[_CARD] = card.text(upload.repo_id).encode()
    left_out = {MANIFEST} if ADAPTER_CONFIG in changed else set()  # it would hold another file's hash
    operations = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and (name := path.relative_to(folder).as_posix()) not in (*changed, *left_out)
    ]
    operations += [CommitOperationAdd(path_in_repo=k, path_or_fileobj=v) for k, v in changed.items()]
    api = HfApi(token=upload.token)
    try:
        repository = api.create_repo(upload.repo_id, private=upload.private, exist_ok=True)
        commit = api.create_commit(
            repository.repo_id,
            operations,
            commit_message=upload.commit_message or f"Upload {card.kind} with fewbits",
            commit_description=upload.commit_description,
            revision=upload.revision,
            create_pr=upload.create_pr,
        )
    except (HfHubHTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(
            f"{upload.repo_id} could not be written on the hub ({reason}); check the name, the token's rights"
            " and the network."
        ) from error
    return str(commit.pr_url or commit.commit_url)


def _said_more(card: Card, upload: Upload) -> Card:
    facts: dict[str, Any] = {name: getattr(card, name) for name in asdict(Card(card.kind))}
    facts["tags"] = (*card.tags, *upload.tags)
    facts["datasets"] = (*card.datasets, *upload.datasets)
    if upload.base_model:
        facts["base_model"] = upload.base_model
    return Card(**facts)


def _base_named(folder: Path, upload: Upload) -> Mapping[str, bytes]:
    """The adapter's configuration with its base's name on the hub, where it names another one."""
    path = folder / ADAPTER_CONFIG
    facts = json.loads(path.read_text(encoding="utf-8"))
    _check_base(str(facts.get("base_model_name_or_path") or ""), upload)
    if not upload.base_model:
        return {}
    facts["base_model_name_or_path"] = upload.base_model
    return {ADAPTER_CONFIG: (json.dumps(facts, indent=2, sort_keys=True) + "\n").encode()}


def _check_base(base: str, upload: Upload) -> None:
    if not upload.base_model and not is_hub_name(base):
        raise BadInput(
            f"the adapter names its base as {base or 'nothing'!r}, which is no name on the Hub, so nobody"
            " else could"
            " load it; give its name there: base_model='owner/name', on the command line --base owner/name."
        )


def _tokenizer_of(model: nn.Module) -> Any:
    return unwrap(model).__dict__.get("fewbits_tokenizer")


__all__ = ["Upload", "push_folder", "push_to_hub", "push_to_hub_gguf", "push_to_hub_merged", "upload_of"]
