"""Row 13 of the convolution pass: checkpoints stream into the graph's layout, within the model plus one tensor."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from transformers import ViTConfig, ViTModel

import layergraph as lg

_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}

# In a process of its own: a peak is a process's. Base: everything but the weights.
_SCRIPT = """
import sys, warnings
import torch, layergraph as lg
from transformers import ViTConfig, ViTModel
warnings.simplefilter("ignore")
torch.set_num_threads(1)
config = ViTConfig.from_pretrained(sys.argv[1])
with torch.device("meta"):
    model = ViTModel(config)
program = lg.trace(model, progress=False).apply(lg.FusePatchEmbed(conv2d=True))
def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # what this process had before, and inherited, does not count
base = peak()
loaded = program.load_weights(sys.argv[1], progress=False)
weights = loaded.state_dict("graph").values()
checksum = sum(float(tensor.double().sum()) if tensor.numel() < 1 << 20 else float(tensor.sum()) for tensor in weights)
size = sum(tensor.numel() * tensor.element_size() for tensor in weights)
largest = max(tensor.numel() * tensor.element_size() for tensor in weights)
print(peak() - base, size, largest)
"""


def _measure(folder) -> tuple[int, int, int]:
    done = subprocess.run([sys.executable, "-c", _SCRIPT, str(folder)], capture_output=True, text=True, check=True)
    peak, size, largest = map(int, done.stdout.split()[-3:])
    return peak, size, largest


def test_row_13_a_sharded_checkpoint_streams_into_the_graphs_layout(tmp_path):
    model = ViTModel(ViTConfig(**_SIZES, image_size=32, patch_size=8)).eval()
    save_torch_state_dict(model.state_dict(), tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    with torch.device("meta"):
        empty = ViTModel(model.config)
    program = lg.trace(empty, progress=False).apply(lg.FusePatchEmbed(conv2d=True))
    loaded = program.load_weights(tmp_path, progress=False)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = model(x).last_hidden_state
    assert all(tensor.device.type == "meta" for tensor in program.state_dict().values())
    torch.testing.assert_close(loaded(x).last_hidden_state, expected, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_row_13_a_checkpoint_of_another_model_or_none_is_named(tmp_path):
    model = ViTModel(ViTConfig(**_SIZES, image_size=32, patch_size=8))
    program = lg.trace(model, progress=False)
    with pytest.raises(FileNotFoundError, match="the folder is empty"):
        program.load_weights(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors"):
        program.load_weights(tmp_path)
    other = ViTModel(ViTConfig(**{**_SIZES, "intermediate_size": 32}, image_size=32, patch_size=8))
    save_torch_state_dict(other.state_dict(), tmp_path)
    with pytest.raises(ValueError, match="has another shape than the program's"):
        program.load_weights(tmp_path)


def test_weights_kept_to_undo_a_pass_are_those_of_the_checkpoint(tmp_path):
    """They were the first model's: undoing a pass after load_weights mixed two models."""
    first, second = (ViTModel(ViTConfig(**_SIZES, image_size=32, patch_size=8)).eval() for _ in range(2))
    save_torch_state_dict(second.state_dict(), tmp_path)
    cut = lg.trace(first).apply(lg.TapOutputs("hidden_states", layers=0, only=True), verify=True)
    whole = cut.load_weights(tmp_path).remove("tap-outputs")
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = second(x).last_hidden_state
    torch.testing.assert_close(whole(x).last_hidden_state, expected, rtol=1e-5, atol=1e-5)


def test_undoing_one_pass_keeps_what_undoing_another_needs():
    program = lg.trace(ViTModel(ViTConfig(**_SIZES, image_size=32, patch_size=8)).eval())
    once = program.apply(lg.TapOutputs("hidden_states", layers=0, only=True), verify=True)
    twice = once.apply(lg.TapOutputs("hidden_states", entries=[0], only=True))
    assert twice.remove("tap-outputs#2").remove("tap-outputs").fingerprint == program.fingerprint


def test_a_checkpoint_of_another_kind_of_number_is_named(tmp_path):
    model = ViTModel(ViTConfig(**_SIZES, image_size=32, patch_size=8))
    state = {name: tensor.to(torch.int8) for name, tensor in model.state_dict().items()}
    save_torch_state_dict(state, tmp_path)
    with pytest.raises(ValueError, match="is of another kind"):
        lg.trace(model).load_weights(tmp_path)


@pytest.mark.slow
def test_row_13_peak_of_a_large_sharded_checkpoint(tmp_path):
    """1 GB in ten shards: the peak above an empty program is the model plus one tensor, and a tenth for the rest."""
    sizes = {"hidden_size": 1280, "num_hidden_layers": 13, "num_attention_heads": 16, "intermediate_size": 5120}
    model = ViTModel(ViTConfig(**sizes))
    model.config.save_pretrained(tmp_path)
    save_torch_state_dict(model.state_dict(), tmp_path, max_shard_size="100MB")
    peak, size, largest = _measure(tmp_path)
    print(f"peak {peak / 1e6:.0f} MB, model {size / 1e6:.0f} MB, largest tensor {largest / 1e6:.0f} MB")
    assert size > 1e9
    assert peak < size + largest + 0.1 * size
