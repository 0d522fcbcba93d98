"""Templates: the shape of a model's return value as plain data, with names of graph outputs at its leaves."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

Template = Any
"""Plain data: ``{"$": name}`` a graph output; ``{"tuple"|"list": [...]}``; ``{"dict": {...}}``;
``{"class": "module:qualname", "fields": {...}}``; ``{"const": value}``; ``None``."""


class Output(OrderedDict):
    """The generic return value: fields by attribute or key, in order, ``None`` fields left out.

    Stands in for the model's own output class where that cannot be imported, and carries taps of models that
    return a bare tensor or tuple (their value is then the field ``output``).
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no field {name!r}; this output has {', '.join(self) or 'no fields'}") from None

    def to_tuple(self) -> tuple[Any, ...]:
        """The fields in order, without names."""
        return tuple(self.values())


def place_in_template(template: Template, place: tuple[str | int, ...], leaf: Template, length: int) -> Template:
    """A copy of ``template`` with ``leaf`` at ``place``; bare returns are first wrapped as field ``output``.

    ``place`` is a field, a field and an index into its tuple, or either of these inside fields that hold others.
    """
    name, *rest = place
    if not (isinstance(template, dict) and ("class" in template or "dict" in template)):
        template = {"class": GENERIC_CLASS, "fields": {"output": template}}
    key = "fields" if "class" in template else "dict"
    fields = dict(template[key])
    if rest and isinstance(rest[0], str):
        inner = fields.get(str(name)) or {"class": GENERIC_CLASS, "fields": {}}
        fields[str(name)] = place_in_template(inner, tuple(rest), leaf, length)
    elif rest:
        index = int(rest[0])
        entry = fields.get(name)
        items = list(entry["tuple"]) if isinstance(entry, dict) and "tuple" in entry else []
        items += [None] * (max(length, index + 1) - len(items))
        items[index] = leaf
        fields[str(name)] = {"tuple": items}
    else:
        fields[str(name)] = leaf
    return {**template, key: fields}


def reserved_names(template: Template) -> frozenset[str]:
    """Names that mean something in the return value whether or not it holds them: fields of its class, and methods."""
    cls = _class_of(template.get("class", GENERIC_CLASS)) if isinstance(template, dict) else Output
    return frozenset((*dir(cls), *getattr(cls, "__dataclass_fields__", {})))


def is_occupied(template: Template, place: tuple[str | int, ...]) -> bool:
    """Whether something that is not None stands at a place, or inside of it."""
    if not (isinstance(template, dict) and ("class" in template or "dict" in template)):
        template = {"dict": {"output": template}}
    node: Template = {"dict": template.get("fields", template.get("dict", {}))}
    for key in place:
        if not isinstance(node, dict):
            return False
        inner = node.get("tuple", node.get("list"))
        if inner is not None:
            node = inner[key] if isinstance(key, int) and key < len(inner) else None
        else:
            node = (node.get("fields") or node.get("dict") or {}).get(key)
    return _has_output(node) or (isinstance(node, dict) and "const" in node)


def _has_output(node: Template) -> bool:
    if isinstance(node, dict):
        return "$" in node or any(_has_output(child) for child in node.values())
    return isinstance(node, list) and any(_has_output(child) for child in node)


def drop_from_template(template: Template, name: str) -> Template:
    """A copy of ``template`` without the output ``name``; a field left with nothing in it is None, or gone."""

    def walk(node: Template) -> Template:
        if not isinstance(node, dict) or "const" in node:
            return node
        if "$" in node:
            return None if node["$"] == name else node
        for key in ("tuple", "list"):
            if key in node:
                return {key: [walk(child) for child in node[key]]}
        key = "fields" if "class" in node else "dict"
        declared = node.get("class", GENERIC_CLASS) != GENERIC_CLASS  # its fields stay, empty
        fields: dict[str, Template] = {}
        for field_name, child in node[key].items():
            rest = walk(child)
            if rest == child or _has_output(rest):
                fields[field_name] = rest
            elif declared:
                fields[field_name] = None
        if node.get("class") == GENERIC_CLASS and list(fields) == ["output"]:
            return fields["output"]
        return {**node, key: fields}

    return walk(template)


GENERIC_CLASS = "layergraph.ir.interface:Output"


def fill_template(template: Template, values: Mapping[str, torch.Tensor]) -> Any:
    """The return value that ``template`` describes, graph outputs in place."""
    if template is None:
        return None
    if "$" in template:
        return values[template["$"]]
    if "const" in template:
        return template["const"]
    if "tuple" in template:
        return tuple(fill_template(child, values) for child in template["tuple"])
    if "list" in template:
        return [fill_template(child, values) for child in template["list"]]
    if "dict" in template:
        return {key: fill_template(child, values) for key, child in template["dict"].items()}
    fields = {key: fill_template(child, values) for key, child in template["fields"].items()}
    return _filled(_class_of(template["class"]), fields)


def _class_of(qualified: str) -> type:
    """The named class, or :class:`Output` where it cannot be had."""
    module, _, name = qualified.partition(":")
    if module.partition(".")[0] == "transformers":
        # Only the library whose classes we recorded is imported by name: a damaged file must not choose imports.
        try:
            cls = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            return Output
        if isinstance(cls, type) and hasattr(cls, "__dataclass_fields__"):
            return cls
    return Output


def _filled(cls: type, fields: Mapping[str, Any]) -> Any:
    """An instance of an output class."""
    if cls is Output:
        return Output((key, value) for key, value in fields.items() if value is not None)
    declared = getattr(cls, "__dataclass_fields__", {})
    result = cls(**{key: value for key, value in fields.items() if key in declared})
    for key, value in fields.items():
        # As upstream's decorator does: recorded keys that are no declared field are set on the instance.
        if key not in declared and value is not None:
            result[key] = value
    return result


__all__ = [
    "Output",
    "Template",
    "drop_from_template",
    "fill_template",
    "is_occupied",
    "place_in_template",
    "reserved_names",
]
