"""``NAME:key=value,...`` becomes a pass, or an error that says what is wrong with it."""

from __future__ import annotations

from typing import Any

import click
import pytest

from layergraph import FusePatchEmbed, TapOutputs
from layergraph.cli.specs import parse_options, parse_pass, parse_tap


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("entries=2,14,-3", {"entries": ["2", "14", "-3"]}),
        ("entries=2", {"entries": ["2"]}),
        ("entries=2,-1,dtype=float16", {"entries": ["2", "-1"], "dtype": ["float16"]}),
        ("layers=none, at=input", {"layers": ["none"], "at": ["input"]}),
    ],
)
def test_options(text: str, options: dict[str, list[str]]) -> None:
    assert parse_options(text) == options


@pytest.mark.parametrize(
    ("text", "tap"),
    [
        ("hidden_states", TapOutputs("hidden_states")),
        ("hidden_states:entries=0,-1", TapOutputs("hidden_states", entries=[0, -1])),
        ("model.layers.*.mlp:dtype=bfloat16", TapOutputs("model.layers.*.mlp", dtype="bfloat16")),
        ("re:.*mlp:layers=0", TapOutputs("re:.*mlp", layers=0)),
        ("re:.*mlp:layers=none, at=input", TapOutputs("re:.*mlp", at="input")),
        ("model.layers.*.mlp:only=true,name=2", TapOutputs("model.layers.*.mlp", only=True, name="2")),
        ("model.layers.0::softmax#0", TapOutputs("model.layers.0::softmax#0")),
        ("model.layers.0::softmax#0:reduce=topk,2", TapOutputs("model.layers.0::softmax#0", reduce=("topk", 2))),
    ],
)
def test_taps(text: str, tap: TapOutputs) -> None:
    assert parse_tap(text) == tap


def test_passes() -> None:
    assert parse_pass("fuse-patch-embed") == FusePatchEmbed()
    assert parse_pass("fuse-patch-embed:conv2d=true") == FusePatchEmbed(conv2d=True)
    assert parse_pass("tap-outputs:what=hidden_states,entries=0") == TapOutputs("hidden_states", entries=0)


@pytest.mark.parametrize(
    ("parse", "text", "says"),
    [
        (parse_pass, "fuse-patch-embd", "Did you mean 'fuse-patch-embed'?"),
        (parse_pass, "nonsense", "There are: tap-outputs, fuse-patch-embed"),
        (parse_pass, "fuse-patch-embed:conv=true", "Did you mean 'conv2d'?"),
        (parse_pass, "fuse-patch-embed:conv2d=maybe", 'True, False, "auto"'),
        (parse_tap, "hidden_states:entrys=1", "Did you mean 'entries'?"),
        (parse_tap, "hidden_states:entries=0,entries=1", "entries is given twice"),
        (parse_tap, "hidden_states:entries=first", "a bool, an int, or a list"),
        (parse_tap, ":entries=1", "nothing to tap"),
    ],
)
def test_faults(parse: Any, text: str, says: str) -> None:
    with pytest.raises(click.BadParameter) as caught:
        parse(text)
    assert says in caught.value.message
