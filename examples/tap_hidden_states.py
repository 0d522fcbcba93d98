"""Three hidden states and the logits of a frozen model, without hooks; then the model cut off after the last one.

For training a draft model or a probe: replace the config by ``AutoModelForCausalLM.from_pretrained(...)``.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import layergraph as lg

config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4, vocab_size=256)
model = LlamaForCausalLM(config).eval()
ids = {"input_ids": torch.randint(0, 256, (2, 12))}

program = lg.optimize(model, passes=[lg.TapOutputs("hidden_states", entries=[1, 3, 5])], verify=True)
out = program(**ids)
with torch.no_grad():
    expected = model(**ids, output_hidden_states=True)
same = all(torch.equal(out.hidden_states[entry], expected.hidden_states[entry]) for entry in (1, 3, 5))
print(program.report())
print("equal to eager, bit for bit:", same and torch.equal(out.logits, expected.logits))

# Nothing behind the last state is wanted: its nodes and weights go.
cut = lg.optimize(model, passes=[lg.TapOutputs("hidden_states", entries=[1, 3], only=True)])
print(cut.report())
assert same and torch.equal(cut(**ids).hidden_states[3], expected.hidden_states[3])
