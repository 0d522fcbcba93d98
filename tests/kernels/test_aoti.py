"""Issue 4: an AOTInductor CPU package of a module with all three ops runs where layergraph is never imported."""

from __future__ import annotations

import subprocess
import sys

import kernel_problems as problems
import torch

from layergraph.kernels import ops

RUNNER = """
import sys, torch
sys.modules["layergraph"] = None  # an import of it would now raise
torch.set_num_threads(1)
model = torch._inductor.aoti_load_package(sys.argv[1])
for sample in torch.load(sys.argv[2]):
    for found, wanted in zip(model(*sample["inputs"]), sample["wanted"], strict=True):
        assert found.stride() == wanted.stride() and found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
assert not [name for name in sys.modules if name.startswith("layergraph.") or name.split(".")[0] == "triton_kernels"]
print("ran", len(sample["inputs"]))
"""


class Net(torch.nn.Module):
    """All three ops; the adapter and alpha are inputs, as programs have them."""

    def forward(self, hidden, shadow, down, up, alpha, *update):
        hidden = ops.shadow_inject(hidden, shadow, down, up, alpha)
        shadow = ops.shadow_update(torch.tanh(hidden), shadow, *update)
        return ops.shadow_update_inject(hidden, shadow, *update, down, up, alpha)


def arguments(tokens, seed, hidden=torch.bfloat16):
    call = problems.make((1, tokens), 64, 8, 12, hidden, torch.float32, seed=seed)
    return (call.hidden, call.shadow, call.down, call.up, call.alpha, *call.update)


def test_package_runs_without_layergraph(tmp_path):
    net, tokens = Net().eval(), torch.export.Dim("tokens", min=1, max=512)
    example = arguments(5, 0)
    shapes = ({1: tokens}, {1: tokens}, None, None, None, (None,) * 8)
    program = torch.export.export(net, example, dynamic_shapes=shapes)
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "net.pt2"))
    # Other lengths, and other adapters: both are inputs, so one package serves them.
    samples = []
    for count, seed in ((1, 0), (5, 1), (33, 2)):
        given = arguments(count, seed)
        # The compiled code keeps float32 where eager rounds to bfloat16 between ops, so compare on the op boundary.
        samples.append({"inputs": given, "wanted": net(*given)})
    for sample in samples:
        loaded = torch._inductor.aoti_load_package(package)
        for found, wanted in zip(loaded(*sample["inputs"]), sample["wanted"], strict=True):
            assert problems.error(found, wanted.double()) < 1e-2
        sample["wanted"] = loaded(*sample["inputs"])
    torch.save(samples, tmp_path / "samples.pt")
    result = subprocess.run(
        [sys.executable, "-I", "-c", RUNNER, package, str(tmp_path / "samples.pt")], capture_output=True, text=True
    )
    assert result.returncode == 0 and "ran" in result.stdout, result.stderr
