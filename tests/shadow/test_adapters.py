"""Adapters of one program: added, switched, deleted, disabled; per call and per thread; bad ones refused."""

from __future__ import annotations

import copy
import json
import shutil
import threading

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from shadow_oracle import oracle, padded_batch, with_adapter

import layergraph as lg
from layergraph.passes.weave_shadow import WeaveShadow

INPUTS = padded_batch()


def expected(twins, name):
    twins.peft_model.set_adapter(name)
    return oracle(twins.peft_model, INPUTS).logits


@pytest.fixture
def n_exports(monkeypatch):
    """How many graphs torch.export makes, and how many programs Edit does."""
    counts = {"export": 0, "edit": 0}
    export, finish = torch.export.export, lg.Edit.finish

    def counted_export(*args, **kwargs):
        counts["export"] += 1
        return export(*args, **kwargs)

    def counted_finish(edit):
        counts["edit"] += 1
        return finish(edit)

    monkeypatch.setattr(torch.export, "export", counted_export)
    monkeypatch.setattr(lg.Edit, "finish", counted_finish)
    return counts


def test_switching_retraces_nothing(twins, n_exports):
    program = twins.fresh()
    program.add_adapter(twins.folders["second"], "second")
    assert list(program.adapters) == ["first", "second"] and program.active_adapter == "first"
    wanted = {name: expected(twins, name) for name in ("first", "second")}
    assert (wanted["first"] - wanted["second"]).abs().max() > 0.1
    module, fingerprint = program.exported.graph_module, program.fingerprint
    for turn in range(20):
        name = ("first", "second")[turn % 2]
        program.set_adapter(name)
        torch.testing.assert_close(program(**INPUTS).logits, wanted[name], atol=1e-5, rtol=0)
    assert n_exports == {"export": 0, "edit": 0}
    assert program.exported.graph_module is module and program.fingerprint == fingerprint


def test_an_adapter_is_chosen_per_call(twins):
    program = twins.fresh()
    program.add_adapter(twins.folders["second"], "second")
    first, second = program(**INPUTS).logits, program(**INPUTS, adapter="second").logits
    torch.testing.assert_close(second, expected(twins, "second"), atol=1e-5, rtol=0)
    assert torch.equal(program(**INPUTS, adapter="first").logits, first)
    with pytest.raises(LookupError, match="no adapter 'third'"):
        program(**INPUTS, adapter="third")


def test_two_threads_use_two_adapters(twins):
    program = twins.fresh()
    program.add_adapter(twins.folders["second"], "second")
    alone = {name: program(**INPUTS, adapter=name).logits for name in (None, "first", "second")}
    wrong = []

    def run(name):
        for _ in range(10):
            if name is None:
                with program.disable_adapter():
                    found = program(**INPUTS).logits
            else:
                found = program(**INPUTS, adapter=name).logits
            if not torch.equal(found, alone[name]):
                wrong.append(name)

    threads = [threading.Thread(target=run, args=(name,)) for name in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_disable_and_delete(twins):
    program = twins.fresh()
    with torch.no_grad():
        plain = twins.base(**INPUTS, use_cache=False).logits
    woven = program(**INPUTS).logits
    with program.disable_adapter():
        assert program.active_adapter is None
        assert torch.equal(program(**INPUTS).logits, plain)
        assert torch.equal(program(**INPUTS, adapter="first").logits, woven)
    assert torch.equal(program(**INPUTS).logits, woven)
    program.add_adapter(twins.folders["second"], "second")
    program.delete_adapter("first")
    assert program.active_adapter == "second"
    torch.testing.assert_close(program(**INPUTS).logits, expected(twins, "second"), atol=1e-5, rtol=0)
    program.delete_adapter("second")
    assert program.active_adapter is None and not program.adapters
    assert torch.equal(program(**INPUTS).logits, plain)
    program.add_adapter(twins.folders["first"], "again")
    assert program.active_adapter == "again"
    assert torch.equal(program(**INPUTS).logits, woven)
    with pytest.raises(LookupError, match="no adapter 'first'"):
        program.delete_adapter("first")
    assert list(twins.program.adapters) == ["first"], "other programs keep their own choice"


def test_without_a_shadow_the_methods_say_what_to_do(twins):
    program = lg.Program(twins.program.ir.source)
    assert program.active_adapter is None and not program.adapters
    with pytest.raises(NotImplementedError, match="no shadow is woven"):
        program.set_adapter("first")
    with pytest.raises(NotImplementedError, match="no shadow is woven"), program.disable_adapter():
        pass


def test_adapters_survive_saving_and_removing_other_passes(twins, tmp_path):
    program = twins.fresh().apply(lg.TapOutputs("hidden_states"))
    program.add_adapter(twins.folders["second"], "second")
    program.set_adapter("second")
    wanted = program(**INPUTS).logits
    program.save(tmp_path / "saved")
    loaded = lg.load(tmp_path / "saved")
    assert loaded.active_adapter == "second" and list(loaded.adapters) == ["first", "second"]
    assert torch.equal(loaded(**INPUTS).logits, wanted)
    assert torch.equal(loaded(**INPUTS, adapter="first").logits, program(**INPUTS, adapter="first").logits)
    bare = loaded.remove("tap-outputs")
    assert bare.active_adapter == "second" and torch.equal(bare(**INPUTS).logits, wanted)
    plain = loaded.remove("weave-shadow")
    assert plain.ir.shadow is None and plain(**INPUTS).hidden_states is not None
    # Saved over: the folder of an adapter that is gone goes.
    loaded.delete_adapter("first")
    loaded.save(tmp_path / "saved")
    (only,) = (tmp_path / "saved" / "adapters").iterdir()
    assert only.name.startswith("second-")
    plain.save(tmp_path / "saved")
    assert not (tmp_path / "saved" / "adapters").exists()
    assert lg.load(tmp_path / "saved").ir.shadow is None


def test_a_damaged_adapter_is_found(twins, tmp_path):
    program = twins.fresh()
    program.save(tmp_path)
    (folder,) = (tmp_path / "adapters").iterdir()
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    save_file({key: tensor + 1 for key, tensor in tensors.items()}, weights)
    with pytest.raises(ValueError, match=r"adapter_model.safetensors is damaged"):
        lg.load(tmp_path)


def test_what_is_saved_peft_loads(twins, tmp_path):
    import copy

    from peft import PeftModel

    twins.fresh().save(tmp_path)
    (folder,) = (tmp_path / "adapters").iterdir()
    loaded = PeftModel.from_pretrained(copy.deepcopy(twins.base), str(folder)).eval()
    torch.testing.assert_close(oracle(loaded, INPUTS).logits, twins.program(**INPUTS).logits, atol=1e-5, rtol=0)
    ours, theirs = (
        load_file(folder / "adapter_model.safetensors"),
        load_file(twins.folders["first"] / "adapter_model.safetensors"),
    )
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_fresh_adapter_is_saved_for_peft(twins, tmp_path):
    import copy

    from peft import PeftModel

    config = {"task_type": "CAUSAL_LM", "layers_to_transform": [1], "init_weights": False, "shadow_alpha": 1.0}
    program = lg.Program(twins.program.ir.source).apply(WeaveShadow(config=config))
    assert program.ir.shadow.geometry["blocks"] == ["model.layers.1"]
    program.save(tmp_path)
    (folder,) = (tmp_path / "adapters").iterdir()
    loaded = PeftModel.from_pretrained(copy.deepcopy(twins.base), str(folder)).eval()
    torch.testing.assert_close(oracle(loaded, INPUTS).logits, program(**INPUTS).logits, atol=1e-5, rtol=0)


# Bad adapters --------------------------------------------------------------------------------------------------------


def spoil(twins, tmp_path, *, config=None, tensors=None):
    folder = tmp_path / "bad"
    shutil.copytree(twins.folders["second"], folder)
    if config:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    if tensors:
        path = folder / "adapter_model.safetensors"
        found = load_file(path)
        tensors(found)
        save_file(found, path)
    return folder


UP = "base_model.model.model.layers.1.shadow_up.default.weight"


@pytest.mark.parametrize(
    ("what", "text", "kind"),
    [
        ({"tensors": lambda found: found.pop(UP)}, "lacks a tensor", ValueError),
        ({"tensors": lambda found: found.update(extra=torch.ones(1))}, "a tensor too many", ValueError),
        ({"tensors": lambda found: found.update({UP: torch.ones(32, 8)})}, "of another shape", ValueError),
        (
            {"tensors": lambda found: found.update({UP: torch.ones(64, 8, dtype=torch.int64)})},
            "another kind",
            ValueError,
        ),
        ({"config": {"r": 4}}, "differs .* in r,", ValueError),
        ({"config": {"target_modules": ["model.layers.1"]}}, "differs .* in blocks", ValueError),
        ({"config": {"shadow_hidden_size": 32}}, "differs .* in shadow_hidden_size", ValueError),
        ({"config": {"peft_type": "LORA"}}, "of another kind", ValueError),
        ({"config": {"use_magic": True}}, "unknown field 'use_magic'", ValueError),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_bad_adapters_are_named_and_change_nothing(twins, tmp_path, what, text, kind):
    program = twins.fresh()
    before, graphs = dict(program.adapters), program.ir
    with pytest.raises(kind, match=text) as caught:
        program.add_adapter(spoil(twins, tmp_path, **what), "bad")
    assert isinstance(caught.value, lg.LayerGraphError)
    assert program.ir is graphs and dict(program.adapters) == before
    source = lg.Program(program.ir.source)
    if "differs" not in text:
        with pytest.raises(kind, match=text):
            source.apply(WeaveShadow(tmp_path / "bad"))
        assert source.ir.shadow is None


def test_row9_a_smaller_adapter_in_a_padded_slot(twins, tmp_path):
    """Rank and update width filled up with zeros: the outputs are its own, and peft loads what is saved."""
    small = with_adapter(copy.deepcopy(twins.base), r=4, update_hidden_size=6, seed=5)
    small.save_pretrained(str(tmp_path / "small"))
    program = twins.fresh()
    with pytest.raises(ValueError, match=r"differs .* in r,[\s\S]*pad=True"):
        program.add_adapter(tmp_path / "small", "small")
    program.add_adapter(tmp_path / "small", "small", pad=True)
    wanted = oracle(small, INPUTS).logits
    torch.testing.assert_close(program(**INPUTS, adapter="small").logits, wanted, rtol=0, atol=1e-5)
    program.save(tmp_path / "saved")
    folder = next((tmp_path / "saved" / "adapters").glob("*small*"))
    again = PeftModel.from_pretrained(copy.deepcopy(twins.base), str(folder))
    torch.testing.assert_close(oracle(again.eval(), INPUTS).logits, wanted, rtol=0, atol=1e-5)
    large = with_adapter(copy.deepcopy(twins.base), r=16)
    with pytest.raises(ValueError, match=r"differs .* in r,[\s\S]*program"):
        program.add_adapter(large, "large", pad=True)


def test_folders_that_are_no_adapters(twins, tmp_path):
    program = twins.fresh()
    with pytest.raises(FileNotFoundError, match=r"adapter_config.json is missing"):
        program.add_adapter(tmp_path, "bad")
    with pytest.raises(FileNotFoundError, match=r"no such folder[\s\S]*owner/name on the Hub"):
        program.add_adapter(str(tmp_path / "nowhere"), "bad")
    with pytest.raises(TypeError, match="not an adapter"):
        program.add_adapter(3, "bad")
    folder = spoil(twins, tmp_path)
    with pytest.raises(ValueError, match="there is an adapter"):
        program.add_adapter(folder, "first")
    with pytest.raises(ValueError, match="no name for an adapter"):
        program.add_adapter(folder, "../up")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(NotImplementedError, match=r"adapter_model.bin is pickled"):
        program.add_adapter(folder, "bad")
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        program.add_adapter(folder, "bad")
    assert list(program.adapters) == ["first"]


def test_an_adapter_for_another_width_is_refused(twins):
    from shadow_oracle import tiny_decoder, weave

    program = weave(tiny_decoder("llama", hidden_size=32, head_dim=8))
    with pytest.raises(ValueError, match=r"of another shape|too many|lacks") as caught:
        program.apply(WeaveShadow(twins.folders["first"]))
    assert caught.value.expected and caught.value.found and program.ir.shadow is None
