"""A vision tower rewritten and put back into its vision-language model: the same tokens, no Conv3d.

Tiny random weights here; ``Qwen2VLForConditionalGeneration.from_pretrained(...)`` goes the same way.
"""

import torch

import layergraph as lg
from layergraph.testing.zoo import tiny_model

model = tiny_model("qwen2_vl", "vlm")
vision = model.config.vision_config
merge, patch = vision.spatial_merge_size**2, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2

# Two images of different size, each with its run of image tokens in the text.
grids = torch.tensor([[1, 4, 4], [1, 4, 8]])
pixels = torch.randn(int(grids.prod(1).sum()), patch)
start, end, image = (getattr(model.config, f"{name}_token_id") for name in ("vision_start", "vision_end", "image"))
text = [5, 6]
for grid in grids:
    text += [start, *[image] * (int(grid.prod()) // merge), end, 7]
ids = torch.tensor([text])
inputs = {
    "input_ids": ids,
    "attention_mask": torch.ones_like(ids),
    "mm_token_type_ids": (ids == image).long(),
    "pixel_values": pixels,
    "image_grid_thw": grids,
}

expected = model.generate(**inputs, max_new_tokens=12, do_sample=False)
program = lg.optimize(model.model.visual, passes=["fuse-patch-embed"], verify=True)
model.model.visual = program.as_module()
found = model.generate(**inputs, max_new_tokens=12, do_sample=False)

print(program.report())
print("same tokens:", torch.equal(found, expected))
assert torch.equal(found, expected)
