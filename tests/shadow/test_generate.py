"""Generation with a shadow: both halves of the cache, against peft without a cache (its cached tokens are wrong)."""

from __future__ import annotations

import copy
import threading
from typing import Any, NamedTuple

import pytest
import torch
from peft import ShadowConfig
from peft.tuners.shadow.model import ShadowCache
from shadow_oracle import oracle, padded_batch, randomise_adapter, tiny_decoder, with_adapter
from transformers import DynamicCache

import layergraph as lg
from layergraph.errors import InputError, NotFoundError, NotSupportedError

PLAIN = {"pad_token_id": 0, "eos_token_id": None, "do_sample": False}


class Case(NamedTuple):
    base: Any
    peft_model: Any
    plain: lg.Program
    program: lg.Program

    def theirs(self, adapter: str | None, **options: Any) -> Any:
        if adapter is None:
            return self.base.generate(use_cache=False, **options)
        self.peft_model.set_adapter(adapter)
        return self.peft_model.generate(use_cache=False, **options)


@pytest.fixture(scope="session", params=["llama", "gemma3_text"])
def case(request, tmp_path_factory):
    """One base under two adapters: with full attention, and with windows of 4 tokens beside it."""
    base = tiny_decoder(request.param)
    peft_model = with_adapter(copy.deepcopy(base), name="first")
    peft_model.add_adapter("second", ShadowConfig(task_type="CAUSAL_LM", shadow_alpha=0.5))
    randomise_adapter(peft_model, "second", seed=2)
    folder = tmp_path_factory.mktemp("adapters")
    peft_model.eval().save_pretrained(str(folder))
    plain = lg.trace(base)
    program = plain.apply(lg.WeaveShadow(folder / "first", name="first"))
    program.add_adapter(folder / "second", "second")
    return Case(base, peft_model, plain, program)


@pytest.mark.parametrize("adapter", ["first", "second", None])
@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 16},
        {"max_new_tokens": 8, "num_beams": 4},
        {"max_new_tokens": 8, "do_sample": True, "top_k": 20},
    ],
    ids=["greedy", "beams", "sampling"],
)
def test_row12_tokens_equal_the_uncached_ones(case, adapter, options):
    given = {**padded_batch(), **PLAIN, **options}
    torch.manual_seed(5)
    theirs = case.theirs(adapter, **given)
    torch.manual_seed(5)
    assert torch.equal(case.program.generate(**given, adapter=adapter), theirs)


def test_row12_assisted_by_the_base_and_by_the_detached_shadow(case):
    ids = padded_batch()["input_ids"][2:]
    theirs = case.theirs("first", input_ids=ids, max_new_tokens=20, **PLAIN)
    for helper in (case.plain.for_generation(), case.program.detach_shadow("first")):
        ours = case.program.generate(ids, assistant_model=helper, max_new_tokens=20, adapter="first", **PLAIN)
        assert torch.equal(ours, theirs)


def test_c7_scores_and_a_conversation_that_goes_on(case):
    ids = padded_batch()["input_ids"]
    given = {"max_new_tokens": 6, "return_dict_in_generate": True, "output_scores": True, **PLAIN}
    theirs = case.theirs("first", input_ids=ids, **given)
    ours = case.program.generate(ids, **given)
    torch.testing.assert_close(torch.stack(ours.scores), torch.stack(theirs.scores), rtol=0, atol=1e-5)
    cache = ours.get("cache", ours.get("past_key_values"))
    more = torch.cat([ours.sequences, ids[:, :3]], dim=1)
    on = case.program.generate(more, cache=cache, max_new_tokens=5, **PLAIN)
    assert torch.equal(on, case.theirs("first", input_ids=more, max_new_tokens=5, **PLAIN))


def test_c7_pieces_rows_of_their_own_length_and_crop(case):
    """A prompt in pieces, padding among them, tokens taken back: always what one full forward says."""
    inputs = padded_batch(seed=4, length=14)
    mask = inputs["attention_mask"]
    places = (mask.cumsum(1) - 1).clamp(min=0)
    case.peft_model.set_adapter("second")
    wanted = oracle(case.peft_model, {**inputs, "position_ids": places}).logits
    session = case.program.session(adapter="second")
    for first, last in ((0, 6), (6, 7), (7, 11)):
        session.step(inputs["input_ids"][:, first:last], mask[:, :last])
    session.cache.crop(-2)
    logits = session.step(inputs["input_ids"][:, 9:], mask, logits_to_keep=0)["logits"]
    torch.testing.assert_close(logits, wanted[:, 9:], rtol=0, atol=1e-5)


def test_c2_rows_are_chosen_and_repeated_in_both_halves(case):
    """What beam search and assisted decoding do to a cache; the object stays, each row goes on as its own."""
    ids = padded_batch(seed=6)["input_ids"]
    session = case.program.session(adapter="first")
    session.step(ids[:, :6])
    cache = session.cache
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 2, 1, 0]))
    order = torch.tensor([0, 0, 2, 2])
    assert session.cache is cache and cache.max_batch_size == 4
    rows = ids[order].clone()
    rows[1::2, 6:] = ids[[0, 2], :3]  # siblings part ways
    logits = session.step(rows[:, 6:], logits_to_keep=0)["logits"]
    case.peft_model.set_adapter("first")
    wanted = oracle(case.peft_model, {"input_ids": rows}).logits
    torch.testing.assert_close(logits, wanted[:, 6:], rtol=0, atol=1e-5)
    cache.reset()
    assert cache.length == 0
    again = session.step(rows, logits_to_keep=0)["logits"]
    torch.testing.assert_close(again, wanted, rtol=0, atol=1e-5)


def test_c1_each_half_has_its_own_depth(case):
    geometry = case.program.session().cache.geometry
    halves = {half: {tensor.layer for tensor in geometry.half(half).tensors} for half in ("base", "shadow")}
    assert halves == {"base": {0, 1}, "shadow": {0}}
    cache = case.program.session(capacity=40).cache
    assert len(cache) == 2  # transformers counts the base's layers


def test_c5_a_cache_without_the_shadows_half_is_refused(case):
    """Upstream starts the shadow again without its history, and says nothing."""
    ids = padded_batch()["input_ids"]
    session = case.plain.session()
    session.step(ids)
    with pytest.raises(ValueError, match="no half for the shadow"):
        case.program.session(cache=session.cache)
    two_halves = case.program.session()
    two_halves.step(ids)
    with pytest.raises(ValueError, match="has a half for a shadow, and the program has none"):
        case.plain.session(cache=two_halves.cache)
    assert session.cache.length == two_halves.cache.length == 9  # as they were
    base, longer = DynamicCache(), DynamicCache()
    case.base(input_ids=ids, past_key_values=longer, use_cache=True)
    for foreign in (longer, ShadowCache(base=longer, shadow=base)):  # plain; halves of unequal length
        with pytest.raises(ValueError, match="goes on only with a cache of its own kind"):
            case.program.generate(ids, cache=foreign, max_new_tokens=2, **PLAIN)
    assert longer.get_seq_length() == 9


def test_c5_what_another_adapter_wrote_is_refused(case):
    ids = padded_batch()["input_ids"]
    session = case.program.session(adapter="first")
    session.step(ids)
    with pytest.raises(InputError, match=r"holds what another adapter computed[\s\S]*'first'[\s\S]*'second'"):
        case.program.session(cache=session.cache, adapter="second")
    with pytest.raises(InputError, match=r"holds what another adapter computed[\s\S]*the base model"):
        case.program.session(cache=session.cache, adapter=None)
    session.cache.reset()
    case.program.session(cache=session.cache, adapter="second").step(ids)  # nothing is held any more
    with pytest.raises(NotFoundError, match="no adapter 'third'"):
        case.program.generate(ids, adapter="third", max_new_tokens=2)


def test_c3_overflow_names_what_is_needed_and_loses_nothing(case):
    ids = padded_batch()["input_ids"]
    session = case.program.session(cache=lg.DualCache(case.program, capacity=10, fixed=True))
    first = session.step(ids, logits_to_keep=0)["logits"]
    with pytest.raises(InputError, match=r"cache is full[\s\S]*13 needed: 9 held, 1 free"):
        session.step(ids[:, :4])
    session.cache.crop(-1)
    again = session.step(ids[:, -1:], logits_to_keep=0)["logits"]
    torch.testing.assert_close(again, first[:, -1:], rtol=0, atol=1e-5)


def test_row9_eight_threads_with_two_adapters_are_bit_equal_to_one_after_the_other(case):
    prompts = [padded_batch(seed=number)["input_ids"] for number in range(8)]
    names = ["first", "second", None, "first", "second", "second", "first", None]

    def tokens(number: int) -> torch.Tensor:
        return case.program.generate(prompts[number], adapter=names[number], max_new_tokens=10, **PLAIN)

    alone = [tokens(number) for number in range(8)]
    together: dict[int, torch.Tensor] = {}
    threads = [threading.Thread(target=lambda n=n: together.update({n: tokens(n)})) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(together[number], alone[number]) for number in range(8))


def test_row9_a_hundred_switches_trace_nothing_and_stay_right(case, monkeypatch):
    inputs = padded_batch()
    wanted = {}
    for name in ("first", "second"):
        case.peft_model.set_adapter(name)
        wanted[name] = oracle(case.peft_model, inputs).logits
    program = lg.Program(case.program.ir)
    graphs = {name: id(exported) for name, exported in program.programs.items()}

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a switch of adapter traced something")

    monkeypatch.setattr(torch.export, "export", never)
    for turn in range(100):
        name = ("first", "second")[turn % 2]
        program.set_adapter(name)
        torch.testing.assert_close(program(**inputs).logits, wanted[name], rtol=0, atol=1e-5)
    assert graphs == {name: id(exported) for name, exported in program.programs.items()}


def test_taps_of_the_shadow_in_cached_steps(case):
    """What is tapped in the uncached graph is tapped in steps too, values of the shadow among them."""
    paths = ("shadow.seed", "shadow.layers.0.update")
    program = case.program
    for path in paths:
        program = program.apply(lg.TapOutputs(path))
    ids = padded_batch()["input_ids"]
    whole = program(input_ids=ids)
    session = program.session()
    pieces = [session.step(ids[:, :5], logits_to_keep=0), session.step(ids[:, 5:], logits_to_keep=0)]
    for path in paths:
        joined = torch.cat([piece[path] for piece in pieces], dim=1)
        torch.testing.assert_close(joined, whole[path], rtol=0, atol=1e-5)


def test_removed_and_saved_programs_still_generate(case, tmp_path):
    given = {"input_ids": padded_batch()["input_ids"], "max_new_tokens": 6, **PLAIN}
    removed = case.program.remove("weave-shadow")
    assert removed.fingerprint == case.plain.fingerprint
    assert torch.equal(removed.generate(**given), case.theirs(None, **given))
    case.program.save(tmp_path / "woven")
    loaded = lg.load(tmp_path / "woven")
    for name in ("first", "second"):
        assert torch.equal(loaded.generate(**given, adapter=name), case.theirs(name, **given))


def test_embeddings_reach_a_backbone_that_shares_them_and_one_that_does_not():
    base = tiny_decoder("llama")
    ids = padded_batch()["input_ids"]
    embeds = base.get_input_embeddings()(ids).detach()
    for options in ({}, {"share_embeddings": False}):
        peft_model = with_adapter(copy.deepcopy(base), **options)
        program = lg.optimize(base, passes=[lg.WeaveShadow(peft_model)])
        found = program.session().step(inputs_embeds=embeds, logits_to_keep=0)["logits"]
        torch.testing.assert_close(found, oracle(peft_model, {"inputs_embeds": embeds}).logits, rtol=0, atol=1e-5)
    narrow = with_adapter(copy.deepcopy(base), shadow_hidden_size=32, shadow_num_attention_heads=4)
    program = lg.optimize(base, passes=[lg.WeaveShadow(narrow)])
    found = program.session().step(ids, logits_to_keep=0)["logits"]
    torch.testing.assert_close(found, oracle(narrow, {"input_ids": ids}).logits, rtol=0, atol=1e-5)
    with pytest.raises(NotSupportedError, match="table of its own"):
        program.session().step(inputs_embeds=embeds)
