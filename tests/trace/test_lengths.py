"""Graphs that hold for every length, or say so: loops over chunks of a text in a model's own Python."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import layergraph as lg
from layergraph.errors import EditError, InputError
from layergraph.ir.inline import inline
from layergraph.testing.zoo import tiny_model
from layergraph.trace.hf_delta import gated_delta_rule


class Chunked(nn.Module):
    """Sums chunks of four tokens one by one, into a tensor that is as long as there are chunks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padded = nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 4))
        chunks = padded.reshape(x.shape[0], -1, 4, x.shape[2])
        out = torch.zeros_like(chunks[:, :, 0])
        for index in range(padded.shape[1] // 4):
            out[:, index] = chunks[:, index].sum(1)
        return out


def test_loop_over_chunks_holds_for_their_number_only_and_says_so(tmp_path):
    model, x = Chunked(), torch.randn(2, 7, 3)
    program = lg.trace(model, {"x": x}, dynamic={"x": {0: "batch", 1: "tokens"}})
    program.save(tmp_path / "saved")
    for each in (program, lg.load(tmp_path / "saved")):
        for length in (5, 8):
            given = torch.randn(3, length, 3)
            assert torch.equal(each(given), model(given))
        for length in (4, 9, 300):  # one chunk, three, many: the graph would compute two, without a word
            with pytest.raises(InputError, match=r"does not take inputs of these sizes[\s\S]*== 2[\s\S]*x \["):
                each(torch.randn(2, length, 3))


def _by_recurrence(query, key, value, g, beta, state):
    """Token by token, in float64."""
    query, key, value, g, beta, state = (item.double() for item in (query, key, value, g, beta, state))
    repeats = value.shape[2] // key.shape[2]
    query, key = query.repeat_interleave(repeats, 2), key.repeat_interleave(repeats, 2)
    query, key = (item * torch.rsqrt((item * item).sum(-1, keepdim=True) + 1e-6) for item in (query, key))
    out = []
    for t in range(query.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        known = torch.einsum("bhkv,bhk->bhv", state, key[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], (value[:, t] - known) * beta[:, t][..., None])
        out.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]) * query.shape[-1] ** -0.5)
    return torch.stack(out, 1), state


@pytest.mark.parametrize("decay", [0.02, 1.0])
@pytest.mark.parametrize("count", [1, 63, 300])
def test_delta_rule_equals_the_recurrence(count, decay):
    generator = torch.Generator().manual_seed(count)
    query, key = (torch.randn(2, count, 2, 16, generator=generator) for _ in range(2))
    value = torch.randn(2, count, 4, 8, generator=generator)
    g, beta = (-decay * torch.rand(2, count, 4, generator=generator), torch.rand(2, count, 4, generator=generator))
    state = torch.randn(2, 4, 16, 8, generator=generator)
    wanted, last = _by_recurrence(query, key, value, g, beta, state)
    found, after = gated_delta_rule(
        query, key, value, g, beta, state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(after.double(), last, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h"])
def test_layers_with_states_take_any_length(family):
    model = tiny_model(family, "lm")
    program = lg.trace(model, cached=False)
    for length in (3, 64, 65, 300):
        ids = torch.randint(3, 90, (2, length), generator=torch.Generator().manual_seed(length))
        with torch.no_grad():
            wanted = model(ids, use_cache=False).logits
        # Of the largest logit: upstream's own sums over chunks differ from float64 by as much.
        assert (program(ids).logits - wanted).abs().max() <= 2e-5 * wanted.abs().max(), length


def test_a_spliced_graph_brings_its_condition_along():
    """Named as the host's input is; where the size is of no input, nothing could check it, so it is refused."""
    x = torch.randn(2, 7, 3)
    dims = {"x": {0: "batch", 1: "tokens"}}
    part = lg.trace(Chunked(), {"x": x}, dynamic=dims).ir.forward
    host = lg.trace(Shifted(), {"y": x}, dynamic={"y": dims["x"]}).ir
    edit = lg.Edit(host)
    entry = edit.input_node("y")
    last = edit.output_node("output")
    made = inline(edit, part, {"x": entry}, before=last, prefix="chunks")
    edit.add_output("chunks", made["output"])
    with pytest.raises(EditError, match="under a condition on input 'y'"):
        edit.remove_input("y")
    program = lg.Program(edit.finish())
    given = torch.randn(3, 8, 3)
    assert torch.equal(program(given).chunks, Chunked()(given))
    with pytest.raises(InputError, match=r"== 2[\s\S]*y \["):
        program(torch.randn(3, 9, 3))
    other = lg.Edit(host)
    with pytest.raises(EditError, match="which is no input here"):
        inline(other, part, {"x": other.output_node("output")}, before=other.output_node("output"), prefix="chunks")


class Shifted(nn.Module):
    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return y + 1
