"""A folder -> a model or a program; and what else of a checkpoint goes along into the output folder."""

from __future__ import annotations

import contextlib
import fnmatch
import importlib
import json
import pkgutil
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layergraph.cli.main import nearest
from layergraph.errors import (
    FormatError,
    InputError,
    LayerGraphError,
    MissingFileError,
    NotFoundError,
    NotSupportedError,
    StorageError,
)

if TYPE_CHECKING:
    from torch import nn

    from layergraph.passes import Pass
    from layergraph.program import Program
    from layergraph.progress import Say

MANIFEST, CONFIG = "manifest.json", "config.json"
# Beside weights and config: what makes a folder a usable checkpoint.
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.tiktoken", "*.spm", "spiece.model", "sentencepiece*.model")
_TOKENIZER = (
    *TOKENIZER_FILES,
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
)
_PROCESSOR = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def open_folder(folder: Path, submodule: str | None, say: Say, attention: str | None = None) -> nn.Module | Program:
    """The program saved in ``folder``, or else the model (or the part of it at ``submodule``).

    Raises:
        MissingFileError: neither is there. And as :func:`load_model` and :func:`layergraph.load` do.
    """
    from layergraph.ir.folder_read import check_folder, kind_of

    check_folder(folder)
    kind = kind_of(folder)
    if kind == "program":
        for option, value in (("--submodule", submodule), ("--attention", attention)):
            if value is not None:
                raise InputError(
                    f"{option} says how to take a model, and this folder holds a program",
                    path=str(folder),
                    do=f"give the model's folder, or leave {option} out",
                )
        from layergraph.api import load

        return load(folder, progress=say)
    if kind != "model":
        is_adapter = kind == "adapter"
        raise MissingFileError(
            f"the folder holds {'an adapter, and no model' if is_adapter else 'neither a model nor a program'}",
            path=str(folder),
            expected=f"{CONFIG} (written by save_pretrained) or {MANIFEST} (written by layergraph)",
            found=", ".join(sorted(item.name for item in folder.iterdir())[:6]),
            do="give the folder of its model, and this one with --pass weave-shadow:adapter=FOLDER, or with --adapter"
            if is_adapter
            else "give a folder written by save_pretrained, or by layergraph",
        )
    model = load_model(folder, say, attention)
    return model if submodule is None else part_of(model, submodule)


def open_program(folder: Path, submodule: str | None, say: Say) -> Program:
    """Like :func:`open_folder`, a model traced and no pass run."""
    from layergraph.api import trace
    from layergraph.program import Program

    opened = open_folder(folder, submodule, say)
    return opened if isinstance(opened, Program) else trace(opened, progress=say)


def load_model(folder: Path, say: Say, attention: str | None = None) -> nn.Module:
    """The model that ``config.json`` names, with its weights, from files of ``folder`` alone.

    ``attention`` is the implementation to load it with; by default what transformers chooses.

    Raises:
        FormatError: the config or the weights are damaged or incomplete.
        NotSupportedError: the class is not part of transformers.
    """
    config = read_config(folder)
    cls = find_class(config, folder)
    say(f"loading {cls.__name__}")
    chosen = {"attn_implementation": attention} if attention is not None else {}
    try:
        model, info = cls.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **chosen,
        )
    except LayerGraphError:
        raise
    except Exception as error:
        raise FormatError(
            f"transformers cannot load {cls.__name__} from the folder",
            path=str(folder),
            found=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            do="check that the folder is complete: config.json, and all weights as safetensors",
        ) from error
    # Loading goes on with random weights where some are missing; nobody wants a graph of those.
    for key, what in (("missing_keys", "lacks weights"), ("mismatched_keys", "has weights of other shapes")):
        names = sorted(str(item[0] if isinstance(item, (tuple, list)) else item) for item in info.get(key) or ())
        if names:
            raise FormatError(
                f"the folder {what} that {cls.__name__} needs",
                path=str(folder),
                found=f"{len(names)}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}",
                do="copy the folder again, or save the model again",
            )
    loaded: nn.Module = model.eval()
    return loaded


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` as data."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise FormatError(
            f"{CONFIG} is damaged", path=str(folder), found=str(error), do="copy the folder again"
        ) from error
    if not isinstance(config, dict):
        raise FormatError(f"{CONFIG} is damaged", path=str(folder), expected="an object", found=type(config).__name__)
    return config


def find_class(config: dict[str, Any], folder: Path) -> Any:
    """The class of ``architectures``, which must be one of transformers' own."""
    import transformers

    names = config.get("architectures")
    if not (isinstance(names, list) and names and isinstance(names[0], str)):
        raise FormatError(
            f"{CONFIG} does not say which class the model is",
            path=str(folder),
            expected='"architectures": ["LlamaForCausalLM"], or the like',
            found=repr(names),
            do="write the folder with model.save_pretrained",
        )
    name = names[0]
    cls = getattr(transformers, name, None) or _inner_class(name, config.get("model_type"))
    if cls is None or not hasattr(cls, "from_pretrained"):
        remote = " (it brings code of its own)" if config.get("auto_map") else ""
        raise NotSupportedError(
            f"{name} is not a class of transformers {transformers.__version__}{remote}",
            path=str(folder),
            do="load the model in Python and call layergraph.optimize(model, ...)",
        )
    return cls


def _inner_class(name: str, model_type: Any) -> Any:
    """Classes that transformers does not export, such as vision towers, from the package of their model type."""
    if not isinstance(model_type, str) or not model_type.isidentifier():
        return None
    # A tower's own model_type may be longer than its package's name: qwen3_vl_vision lies in qwen3_vl.
    parts = model_type.split("_")
    for length in range(len(parts), 0, -1):
        with contextlib.suppress(ImportError):
            package = importlib.import_module(f"transformers.models.{'_'.join(parts[:length])}")
            for item in pkgutil.iter_modules(package.__path__):
                if item.name.startswith("modeling_"):
                    module = importlib.import_module(f"{package.__name__}.{item.name}")
                    if hasattr(module, name):
                        return getattr(module, name)
    return None


def part_of(model: nn.Module, path: str) -> nn.Module:
    """The submodule at ``path``.

    Raises:
        NotFoundError: names the nearest paths.
    """
    paths = dict(model.named_modules())
    if path in paths:
        return paths[path]
    near = nearest(path, paths)
    parts = [name for name in paths if name and name.count(".") < 2]
    raise NotFoundError(
        f"{type(model).__name__} has no module {path!r}",
        expected=", ".join(parts[:8]) + (", ..." if len(parts) > 8 else ""),
        found=f"did you mean {near!r}?" if near else None,
        do="give --submodule a path from this list, or one below it",
    )


def check_adapters(passes: Sequence[Pass]) -> None:
    """Refuse an adapter that is not a folder here, before a model is loaded and traced.

    Raises:
        MissingFileError: names the folder that is not there.
    """
    from layergraph.passes import WeaveShadow

    for item in passes:
        if isinstance(item, WeaveShadow) and item.adapter is not None and not Path(str(item.adapter)).is_dir():
            raise MissingFileError(
                "this is a file, not a folder" if Path(str(item.adapter)).exists() else "no such folder",
                pass_name=item.pass_name,
                path=str(item.adapter),
                expected="a folder that peft's save_pretrained wrote",
                do="check the path; one that is on a hub must be downloaded first, since nothing is downloaded here",
            )


def check_output(out: Path, source: Path) -> None:
    """Refuse, before long work, an output that would not hold one program afterwards.

    Raises:
        StorageError: a file. InputError: the model's own folder, or another checkpoint's.
    """
    if out.exists() and not out.is_dir():
        raise StorageError("the output is a file", path=str(out), do="give a folder, or a name that is free")
    if not out.is_dir() or (out / MANIFEST).is_file():
        return
    foreign = next((item.name for item in out.iterdir() if fnmatch.fnmatch(item.name, "*model*.safetensors")), None)
    if out.resolve() == source.resolve() or foreign is not None:
        # transformers prefers model.safetensors over the files of a program: it would read the old weights.
        raise InputError(
            "the output folder holds a model's checkpoint already",
            path=str(out),
            found=foreign,
            do="give a folder of its own",
        )


def copy_companions(source: Path, out: Path, *, whole: bool) -> list[str]:
    """Copy tokenizer, processor and generation files that ``out`` lacks; only processors for a part of a model.

    Raises:
        StorageError: the disk is full, or a file cannot be read.
    """
    if source.resolve() == out.resolve():
        return []
    copied = []
    patterns = (*_TOKENIZER, *_PROCESSOR) if whole else _PROCESSOR
    for path in sorted(source.iterdir()):
        target = out / path.name
        if path.is_file() and not target.exists() and any(fnmatch.fnmatch(path.name, item) for item in patterns):
            try:
                shutil.copyfile(path, target)
            except OSError as error:
                target.unlink(missing_ok=True)
                raise StorageError(
                    f"cannot copy {path.name}; the program itself is saved",
                    path=str(out),
                    found=error.strerror or str(error),
                    do="free space, then copy it by hand",
                ) from error
            copied.append(path.name)
    return copied


__all__ = [
    "TOKENIZER_FILES",
    "check_adapters",
    "check_output",
    "copy_companions",
    "find_class",
    "load_model",
    "open_folder",
    "open_program",
    "part_of",
    "read_config",
]
