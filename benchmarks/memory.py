"""Peak memory of a bfloat16 Qwen3-VL tower, eager and fused: ``python benchmarks/memory.py``.

Real widths, two blocks deep, 4,096 patches; each form in a process of its own, the peak reset when weights and inputs
are there, so that what is told is what running it takes on top.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys, warnings
import torch, layergraph as lg
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionConfig, Qwen3VLVisionModel
warnings.simplefilter("ignore")
torch.set_num_threads(1)
config = Qwen3VLVisionConfig(depth=2, deepstack_visual_indexes=[0])
tower = Qwen3VLVisionModel(config).to(torch.bfloat16).eval()
grid = torch.tensor([[1, 64, 64]])
pixels = torch.randn(4096, 3 * 2 * 16 * 16, dtype=torch.bfloat16)
part = sys.argv[2] == "embedding"
if sys.argv[1] == "fused":
    program = lg.optimize(tower, ["fuse-patch-embed"], progress=False)
    if part:
        program = program.apply(lg.TapOutputs("patch_embed", only=True))
    run = lambda: program(pixels, grid_thw=grid)
else:
    run = (lambda: tower.patch_embed(pixels)) if part else (lambda: tower(pixels, grid_thw=grid))
def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name)) / 1024
if sys.argv[1] == "fused":
    pass
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = status("VmRSS")
with torch.no_grad():
    run()
print(status("VmHWM") - before)
"""


def main() -> None:
    found = {}
    for part in ("embedding", "tower"):
        for form in ("eager", "fused"):
            peaks = []
            for _ in range(3):
                done = subprocess.run(
                    [sys.executable, "-c", SCRIPT, form, part], capture_output=True, text=True, check=True
                )
                peaks.append(round(float(done.stdout.split()[-1]), 1))
            found[f"{part}, {form}"] = sorted(peaks)
            print(f"{part:10} {form:6} {sorted(peaks)[1]:8.1f} MiB above weights and inputs ({peaks})", flush=True)
    out = Path(__file__).parent / "results" / "memory-qwen3_vl-bfloat16.json"
    out.write_text(json.dumps({"unit": "MiB above weights and inputs", "three runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
