"""Kinds of models that people bring: traced so that they equal eager, or refused by name. Never wrong in silence."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from transformers import AutoModelForCausalLM

import layergraph as lg
from layergraph.errors import NotSupportedError
from layergraph.testing.zoo import tiny_model

peft = pytest.importorskip("peft")

IDS = torch.tensor([[5, 9, 11, 7, 30, 2], [8, 3, 3, 40, 21, 17]])
LINEARS = ["q_proj", "v_proj"]


def adapted(config):
    """A PeftModel whose adapter does something."""
    model = peft.get_peft_model(tiny_model("llama", "lm"), config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data + 0.1 * torch.randn(parameter.shape, generator=generator)
            assert "base_layer" not in name
    return model.eval()


def lora(**options):
    return peft.LoraConfig(r=4, target_modules=LINEARS, task_type="CAUSAL_LM", **options)


def same_as_eager(model, program):
    with torch.no_grad():
        expected = model(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(program(input_ids=IDS).logits, expected, rtol=0, atol=1e-6)
    return expected


@pytest.mark.parametrize(
    "config",
    [
        lora(),
        lora(use_dora=True),
        peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    ],
    ids=["lora", "dora", "ia3"],
)
def test_adapters_in_the_modules_are_traced_as_they_compute(config):
    model = adapted(config)
    program = lg.trace(model, cached=False, progress=False)
    with_adapter = same_as_eager(model, program)
    with model.disable_adapter(), torch.no_grad():
        assert not torch.equal(model(input_ids=IDS, use_cache=False).logits, with_adapter)


def test_lora_generates_with_the_adapter_in_place_and_merged():
    model = adapted(lora())
    options = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 5, "do_sample": False}
    program = lg.optimize(model, ["fuse-patch-embed"], progress=False)
    tokens = model.generate(input_ids=IDS, **options)
    assert torch.equal(program.generate(IDS, **options), tokens)
    merged = model.merge_and_unload().eval()
    program = lg.trace(merged, cached=False, progress=False)
    same_as_eager(merged, program)
    assert not any("lora" in name for name in program.state_dict())


def test_the_adapter_that_is_active_is_the_one_that_is_traced():
    model = adapted(lora())
    model.add_adapter("other", lora())
    for name, parameter in model.named_parameters():
        if ".other." in name:
            parameter.data = torch.full_like(parameter, 0.05)
    first = same_as_eager(model, lg.trace(model, cached=False, progress=False))
    model.set_adapter("other")
    assert not torch.equal(same_as_eager(model, lg.trace(model, cached=False, progress=False)), first)


@pytest.mark.parametrize(
    ("config", "message", "remedy"),
    [
        (lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"), "learnt prompts", "base model"),
        (lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"), "learnt prompts", "base model"),
        (lambda: peft.ShadowConfig(task_type="CAUSAL_LM"), "a shadow adapter is woven in", "WeaveShadow"),
    ],
)
def test_adapters_outside_of_the_modules_are_refused(config, message, remedy):
    model = peft.get_peft_model(tiny_model("llama", "lm"), config())
    with pytest.raises(NotSupportedError, match=message) as caught:
        lg.trace(model, progress=False)
    assert remedy in caught.value.do


def test_quantised_bases_are_refused():
    # A package of its own, which the suite does not install: `pip install torchao` brings this check.
    if importlib.util.find_spec("torchao") is not None:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        model = tiny_model("llama", "lm")
        quantize_(model, Int8WeightOnlyConfig())
        with pytest.raises(NotSupportedError, match="a quantised base") as caught:
            lg.trace(model, progress=False)
        assert "torchao" in caught.value.found
    model = torch.ao.quantization.quantize_dynamic(tiny_model("llama", "lm"), {nn.Linear})
    with pytest.raises(NotSupportedError, match="a quantised base") as caught:
        lg.trace(model, progress=False)
    assert caught.value.path == "model.layers.0.self_attn.q_proj"


def test_weights_of_a_tensor_class_of_their_own_are_refused():
    model = tiny_model("llama", "lm")
    up = model.model.layers[0].mlp.up_proj
    up.weight = nn.Parameter(TwoTensor(up.weight.data, up.weight.data.clone()))
    with pytest.raises(NotSupportedError, match="of a tensor class of its own") as caught:
        lg.trace(model, progress=False)
    assert caught.value.path == "model.layers.0.mlp.up_proj.weight"


def test_offload_hooks_are_refused():
    accelerate = pytest.importorskip("accelerate")
    with pytest.raises(NotSupportedError, match="offload hooks") as caught:
        lg.trace(accelerate.cpu_offload(tiny_model("llama", "lm")), progress=False)
    assert "device_map" in caught.value.do


def test_wrappers_that_spread_a_model_are_refused():
    with pytest.raises(NotSupportedError, match="spreads a model over devices") as caught:
        lg.trace(nn.DataParallel(tiny_model("llama", "lm")), progress=False)
    assert caught.value.do == "pass model.module"


def test_flex_attention_is_refused():
    with pytest.raises(NotSupportedError, match="flex_attention cannot be traced") as caught:
        lg.trace(tiny_model("llama", "lm", attn_implementation="flex_attention"), progress=False)
    assert 'set_attn_implementation("sdpa")' in caught.value.do


def test_generate_of_an_encoder_decoder_is_refused():
    program = lg.trace(tiny_model("t5", "seq2seq"), progress=False)
    with pytest.raises(NotSupportedError, match="no cached graph") as caught:
        program.generate(input_ids=IDS, max_new_tokens=2)
    assert "T5ForConditionalGeneration" in str(caught.value)


def test_tied_weights_stay_one_tensor_through_passes_and_folders(tmp_path):
    model = tiny_model("llama", "lm", tie_word_embeddings=True)
    program = lg.optimize(model, [lg.TapOutputs("hidden_states", entries=[0])], progress=False)
    program.save(tmp_path / "saved", progress=False)
    for one in (program, lg.load(tmp_path / "saved", progress=False)):
        state = one.state_dict()
        assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
        same_as_eager(model, one)


REMOTE = """
import torch
from torch import nn
from transformers import GenerationMixin, LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaModel

class OddConfig(LlamaConfig):
    model_type = "odd_llama"

class OddForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = OddConfig
    _supports_sdpa = True
    def __init__(self, config):
        super().__init__(config)
        self.model = LlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        return {"logits": self.lm_head(out.last_hidden_state) * 0.5}
"""


def test_models_that_bring_code_of_their_own_are_traced_and_load_without_it(tmp_path):
    source = tiny_model("llama", "lm", tie_word_embeddings=False)
    source.save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config |= {
        "model_type": "odd_llama",
        "architectures": ["OddForCausalLM"],
        "auto_map": {"AutoConfig": "odd.OddConfig", "AutoModelForCausalLM": "odd.OddForCausalLM"},
    }
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    Path(tmp_path / "model" / "odd.py").write_text(REMOTE)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=True).eval()
    with torch.no_grad():
        expected = model(input_ids=IDS, use_cache=False)["logits"]
    program = lg.trace(model, progress=False)
    assert torch.equal(program(input_ids=IDS)["logits"], expected)
    loaded = lg.load(program.save(tmp_path / "saved", progress=False), progress=False)
    assert torch.equal(loaded(input_ids=IDS)["logits"], expected)
