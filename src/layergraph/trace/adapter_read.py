"""Read shadow adapters: a folder, a Hub id, or a PeftModel. Nothing is unpickled, and a folder needs no peft."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from layergraph.errors import FormatError, InputError, InputTypeError, MissingFileError, NotSupportedError
from layergraph.ir import safetensors_io
from layergraph.ir.adapter_folder import CONFIG_FILE, WEIGHTS_FILE
from layergraph.ir.paths import as_path
from layergraph.trace.adapter_config import ShadowSettings, read_config
from layergraph.trace.hub import check_source

PICKLED_FILE = "adapter_model.bin"
_PASS = "weave-shadow"


@dataclass(frozen=True)
class AdapterSource:
    """One adapter as it was found.

    Attributes:
        settings: its configuration, checked.
        config: the same as ``adapter_config.json``, with what peft notes beside it.
        tensors: by checkpoint key; None for one that is to be made fresh.
    """

    settings: ShadowSettings
    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor] | None

    @classmethod
    def of(cls, raw: Any, tensors: Mapping[str, torch.Tensor] | None) -> AdapterSource:
        settings = read_config(raw)
        noted = raw if isinstance(raw, Mapping) else raw.to_dict()
        common = {key: noted.get(key) for key in ("base_model_name_or_path", "revision", "peft_version")}
        return cls(settings, {**settings.to_dict(), **common}, tensors)


def read_adapter(source: Any) -> dict[str, AdapterSource]:
    """The adapters in ``source`` by name, the active one first. A folder holds one, called ``default``.

    Args:
        source: a folder, a Hub id, or a PeftModel.

    Raises:
        InputTypeError: none of these. InputError: an adapter of another kind.
        MissingFileError, FormatError: a file is not there, or damaged.
        NotSupportedError: the weights are pickled.
    """
    if isinstance(source, Path):
        source = os.path.join(os.curdir, source)  # never an id of the Hub, though it may look like one
    if isinstance(source, str):
        return {"default": _read_folder(source)}
    if hasattr(source, "peft_config") and hasattr(source, "base_model"):
        return _read_model(source)
    raise InputTypeError(
        "not an adapter",
        pass_name=_PASS,
        expected="a folder, a Hub id, or a PeftModel with a SHADOW adapter",
        found=f"{type(source).__name__}: {source!r}"[:80],
        do="pass the folder that save_pretrained wrote",
    )


def _read_folder(source: str) -> AdapterSource:
    folder = as_path(source, "adapter's folder")
    config_path = _find(source, CONFIG_FILE)
    try:
        raw = json.loads(config_path.read_bytes())
    except ValueError as error:
        raise FormatError(
            f"{CONFIG_FILE} is damaged", path=source, found=str(error), do="copy the adapter again"
        ) from error
    if not isinstance(raw, Mapping):
        raise FormatError(f"{CONFIG_FILE} holds no mapping", path=source, do="copy the adapter again")
    settings_first = AdapterSource.of(raw, None)  # a LoRA folder is refused for what it is, not for its tensors
    if folder.is_dir() and not (folder / WEIGHTS_FILE).is_file() and (folder / PICKLED_FILE).is_file():
        raise NotSupportedError(
            f"{PICKLED_FILE} is pickled, and loading it could run any code",
            pass_name=_PASS,
            path=source,
            expected=WEIGHTS_FILE,
            do="save the adapter again with save_pretrained(..., safe_serialization=True)",
        )
    tensors = safetensors_io.read(_find(source, WEIGHTS_FILE))
    return AdapterSource(settings_first.settings, settings_first.config, tensors)


def _find(source: str, name: str) -> Path:
    folder = Path(source)
    if folder.is_dir():
        if not (folder / name).is_file():
            raise MissingFileError(
                f"{name} is missing", pass_name=_PASS, path=source, do="give a folder that peft's save_pretrained wrote"
            )
        return folder / name
    check_source(source, _PASS)
    from transformers.utils import cached_file

    try:
        found = cached_file(source, name)
    except (OSError, ValueError) as error:
        raise MissingFileError(
            f"{source!r} is neither a folder nor an adapter on the Hub that can be reached",
            pass_name=_PASS,
            found=str(error).strip().splitlines()[0][:200],
            do="check the path, and the connection; or download the adapter and give its folder",
            shell="download the adapter first and give its folder: nothing is downloaded here",
        ) from error
    return Path(found)


def _read_model(model: Any) -> dict[str, AdapterSource]:
    from peft import get_peft_model_state_dict

    active = model.active_adapter if isinstance(model.active_adapter, str) else model.active_adapter[0]
    found = {}
    for name in sorted(model.peft_config, key=lambda name: name != active):
        # Settings first: peft itself fails on the state dict of some kinds.
        source = AdapterSource.of(model.peft_config[name], None)
        tensors = get_peft_model_state_dict(model, adapter_name=name)
        targets = source.settings.target_modules
        if targets is None:
            raise InputError("the PeftModel's adapter has no targets", pass_name=_PASS, found=name)
        found[name] = AdapterSource(source.settings, source.config, {k: v.detach() for k, v in tensors.items()})
    return found


__all__ = ["PICKLED_FILE", "AdapterSource", "read_adapter"]
