"""The step graph compiled ahead of time: weights outside, caches mutated in place, any capacity."""

import pytest
import torch

from layergraph.ir.execute import run_graph
from layergraph.runtime import DualCache

pytestmark = pytest.mark.slow  # one compilation, half a minute on two quiet cores


@pytest.fixture(scope="module")
def compiled(qwen3, tmp_path_factory):
    _, program = qwen3
    exported = program.programs["step"]
    path = torch._inductor.aoti_compile_and_package(
        exported,
        package_path=str(tmp_path_factory.mktemp("aot") / "step.pt2"),
        inductor_configs={"aot_inductor.package_constants_in_so": False},
    )
    package = torch._inductor.aoti_load_package(path)
    wanted = {*package.get_constant_fqns()}
    state = {name: tensor for name, tensor in program.ir.state.items() if name in wanted}
    package.load_constants(state, check_full_update=True, user_managed=True)
    return package


@pytest.mark.parametrize("capacity", [63, 300])
def test_prefill_and_decode_equal_eager_replay_and_the_model(qwen3, compiled, reference, capacity):
    model, program = qwen3
    unit = program.ir["step"]
    ids = torch.randint(3, 90, (2, 9))
    session = program.session(capacity=capacity)
    cache = DualCache(program, batch_size=2, capacity=capacity)
    # Whole storage, not a prefix: the package must run for any number of slots.
    for part in (slice(0, 6), slice(6, 7), slice(7, 8), slice(8, 9)):
        real = torch.ones(2, part.stop - part.start, dtype=torch.bool)
        cache.reserve(real)
        tokens = cache.n_tokens[:, None] + real.cumsum(1) - 1
        given = {
            "input_ids": ids[:, part].contiguous(),
            "inputs_embeds": torch.zeros(*real.shape, 64),
            "position_ids": tokens,
            "token_positions": tokens.clone(),
            "logits_to_keep": torch.arange(real.shape[1]),
            **cache.slots(tokens, real),
            **{name: cache._tensors[name] for name in cache.views(real)},
        }
        flat = unit.interface.check(given)
        before = {name: tensor.clone() for name, tensor in flat.items()}
        outputs = compiled(**flat)
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[unit.interface.outputs.index("logits")]
        wanted = run_graph(unit, before)["logits"]
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-5)
        for name in cache.views(real):
            torch.testing.assert_close(flat[name], before[name], rtol=0, atol=1e-5)
        assert torch.equal(flat["full_positions"], before["full_positions"])
        cache.advance(real)
        whole = reference(model, ids)[:, part]
        torch.testing.assert_close(logits, whole, rtol=0, atol=1e-5)
        stepped = session.step(ids[:, part], logits_to_keep=0)["logits"]
        torch.testing.assert_close(logits, stepped, rtol=0, atol=1e-5)
