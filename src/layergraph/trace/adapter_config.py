"""The configuration of a shadow adapter: peft's ``ShadowConfig`` as data, its checks, and which blocks it means.

Reading an adapter must not need peft, so its rules are written down here; they follow peft 0.21
(``peft.tuners.shadow.config``, ``peft.tuners.tuners_utils.check_target_module_exists``).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layergraph.errors import InputError, InputTypeError, NotFoundError, NotSupportedError

# What every peft configuration holds besides the fields of its own kind. None of it changes what is computed.
_COMMON = ("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "revision")
_MIRROR_ONLY = (
    "shadow_num_hidden_layers",
    "shadow_hidden_size",
    "shadow_num_attention_heads",
    "shadow_intermediate_size",
)
_COUNTS = ("r", "update_hidden_size", *_MIRROR_ONLY)
_TASKS = ("CAUSAL_LM", "SEQ_CLS")
_PASS = "weave-shadow"


@dataclass(frozen=True)
class ShadowSettings:
    """Fields of peft's ``ShadowConfig``, with its defaults; see there for what each means."""

    target_modules: str | tuple[str, ...] | None = None
    exclude_modules: str | tuple[str, ...] | None = None
    r: int = 8
    shadow_alpha: float = 0.1
    shadow_dropout: float = 0.2
    init_weights: bool = True
    shadow_model: str = "mirror"
    shadow_num_hidden_layers: int | None = None
    shadow_hidden_size: int | None = None
    shadow_num_attention_heads: int | None = None
    shadow_intermediate_size: int | None = None
    share_embeddings: bool = True
    update_hidden_size: int | None = None
    auxiliary_loss_weight: float = 0.05
    layers_to_transform: int | tuple[int, ...] | None = None
    layers_pattern: str | tuple[str, ...] | None = None
    modules_to_save: tuple[str, ...] | None = None
    task_type: str | None = None

    @property
    def update_size(self) -> int:
        return self.update_hidden_size or self.r

    def to_dict(self) -> dict[str, Any]:
        """``adapter_config.json``: what peft reads."""
        data = {"peft_type": "SHADOW", **dict.fromkeys(_COMMON), **_plain(dataclasses.asdict(self))}
        return {**data, "peft_type": "SHADOW", "inference_mode": True}


def read_config(config: Any) -> ShadowSettings:
    """Settings from a peft ``ShadowConfig`` or a mapping such as ``adapter_config.json``.

    Raises:
        InputTypeError: neither. InputError: a field is unknown or has a value that peft refuses.
        NotSupportedError: a task, or an option of newer versions, that is not supported.
    """
    if not isinstance(config, Mapping):
        to_dict = getattr(config, "to_dict", None)
        if to_dict is None:
            raise InputTypeError(
                "config is no adapter configuration",
                pass_name=_PASS,
                expected="a peft.ShadowConfig or a mapping of its fields",
                found=type(config).__name__,
            )
        config = to_dict()
    kind = getattr(config.get("peft_type"), "value", config.get("peft_type"))
    if kind not in (None, "SHADOW"):
        raise InputError(
            "the adapter is of another kind",
            pass_name=_PASS,
            expected="peft_type SHADOW",
            found=f"peft_type {kind}",
            do="merge it into the model with peft, then trace the model",
            shell="merge it into the model with peft, save that with save_pretrained, and give its folder",
        )
    names = {item.name for item in dataclasses.fields(ShadowSettings)}
    unknown = [key for key, value in config.items() if key not in names and key not in _COMMON and value]
    if unknown:
        raise InputError(
            f"unknown field {unknown[0]!r} in the adapter's configuration",
            pass_name=_PASS,
            expected=", ".join(sorted(names)),
            found=f"{unknown[0]}={config[unknown[0]]!r}",
            do="use a version of layergraph that knows it, or leave it out",
        )
    values = {key: _frozen(value) for key, value in config.items() if key in names}
    values["task_type"] = getattr(values.get("task_type"), "value", values.get("task_type"))
    settings = ShadowSettings(**values)
    _check(settings)
    return settings


def _check(settings: ShadowSettings) -> None:
    def fail(what: str, field: str, expected: str) -> None:
        found = f"{field}={getattr(settings, field)!r}"
        raise InputError(what, pass_name=_PASS, expected=expected, found=found, do="change that field")

    for field in _COUNTS:
        value = getattr(settings, field)
        if field == "r" and not (isinstance(value, int) and value > 0):
            fail("`r` should be a positive integer value", "r", "1 or more")
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            fail(f"`{field}` is no size", field, "None, or 1 or more")
    if not 0.0 <= settings.shadow_dropout < 1.0:
        fail("`shadow_dropout` is no probability", "shadow_dropout", "0 or more, below 1")
    if isinstance(settings.target_modules, str):
        for field in ("layers_to_transform", "layers_pattern"):
            if getattr(settings, field) is not None:
                fail(f"`{field}` cannot be used when `target_modules` is a str", field, "None")
    if settings.layers_pattern and settings.layers_to_transform is None:
        what = "when `layers_pattern` is specified, `layers_to_transform` must also be specified"
        fail(what, "layers_to_transform", "an index or a list of them")
    if settings.shadow_model != "mirror":
        for field in _MIRROR_ONLY:
            if getattr(settings, field) is not None:
                what = f"a `shadow_model` checkpoint defines its architecture; unset `{field}`"
                fail(what, field, "None")
    if settings.task_type not in (None, *_TASKS):
        raise NotSupportedError(
            "a shadow adapter for another task",
            pass_name=_PASS,
            expected=" or ".join(_TASKS),
            found=f"task_type {settings.task_type}",
        )


def find_blocks(settings: ShadowSettings, stack: Sequence[str], *, by_index: bool) -> tuple[str, ...]:
    """The blocks among ``stack`` (paths of the decoder's blocks, in order) that the settings mean.

    Args:
        by_index: whether ``layers_to_transform`` selects among blocks that ``target_modules`` names in full, as its
            documentation says. peft 0.21 ignores it there, so for checkpoints that it wrote it must not.

    Raises:
        NotFoundError: none.
        InputError: they are not contiguous: the shadow state rides from the first to the last without a gap.
    """
    chosen = [path for path in stack if _is_target(settings, path, by_index)]
    if not chosen:
        raise NotFoundError(
            f"target_modules {settings.target_modules!r} matches no block",
            pass_name=_PASS,
            expected=f"blocks among {stack[0]} ... {stack[-1]}",
            found=_selection(settings),
            do="name whole decoder blocks, or leave target_modules out for all of them",
        )
    first, last = stack.index(chosen[0]), stack.index(chosen[-1])
    if missing := [path for path in stack[first : last + 1] if path not in chosen]:
        raise InputError(
            "the targeted blocks are not contiguous: the shadow state rides from the first to the last",
            pass_name=_PASS,
            path=missing[0],
            expected=f"every block from {chosen[0]} to {chosen[-1]}",
            found=f"{', '.join(missing)} left out",
            do="target those too, or fewer blocks",
        )
    return tuple(chosen)


def _is_target(settings: ShadowSettings, path: str, by_index: bool) -> bool:
    if _matches(settings.exclude_modules, path) or _is_saved(settings.modules_to_save, path):
        return False
    targets = settings.target_modules
    if isinstance(targets, str):
        return re.fullmatch(targets, path) is not None
    is_exact = targets is None or path in targets
    if not is_exact and not _matches(targets, path):
        return False
    wanted = settings.layers_to_transform
    if wanted is None or wanted == () or (is_exact and not by_index):
        return True
    container, _, index = path.rpartition(".")
    patterns = settings.layers_pattern
    patterns = (patterns,) if isinstance(patterns, str) else patterns
    if patterns and not any(re.fullmatch(rf"(?:.*\.)?{pattern}", container) for pattern in patterns):
        return False
    return index.isdigit() and (int(index) in ((wanted,) if isinstance(wanted, int) else wanted))


def _matches(names: str | Iterable[str] | None, path: str) -> bool:
    if not names:
        return False
    if isinstance(names, str):
        return re.fullmatch(names, path) is not None
    return any(path == name or path.endswith(f".{name}") for name in names)


def _is_saved(names: Iterable[str] | None, path: str) -> bool:
    return any(re.match(rf"(^|.*\.){name}($|\..*)", path) for name in names or ())


def _selection(settings: ShadowSettings) -> str | None:
    fields = ("exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save")
    said = [f"{field}={getattr(settings, field)!r}" for field in fields if getattr(settings, field) is not None]
    return ", ".join(said) or None


def _frozen(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return tuple(sorted(value))
    return tuple(value) if isinstance(value, (list, tuple)) else value


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


__all__ = ["ShadowSettings", "find_blocks", "read_config"]
