"""transformers' generate over a program: row C8. Tokens equal those of the eager model without a cache."""

import pytest
import torch
from transformers import MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import layergraph as lg
from layergraph.errors import InputError, NotSupportedError
from layergraph.runtime import DualCache
from layergraph.runtime.generate import CACHE_NAME

PLAIN = {"pad_token_id": 0, "eos_token_id": None}


def both(each, ids, mask=None, *, seed=None, **options):
    """Tokens of the eager model without a cache, and ours, under the same options and seed."""
    model, program = each
    results = []
    for generate, cached in ((model.generate, {"use_cache": False}), (program.generate, {})):
        if seed is not None:
            torch.manual_seed(seed)
        results.append(generate(ids, attention_mask=mask, **PLAIN, **options, **cached))
    return results


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False, "max_new_tokens": 16},  # past windows of 4
        {"do_sample": False, "max_new_tokens": 8, "num_beams": 4},
        {"do_sample": False, "max_new_tokens": 8, "num_beams": 4, "num_return_sequences": 2},
        {"do_sample": True, "max_new_tokens": 12, "seed": 5, "top_k": 20, "temperature": 0.9},
        {"do_sample": False, "max_new_tokens": 8, "prefill_chunk_size": 4},
        {"do_sample": False, "max_new_tokens": 8, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    ],
    ids=["greedy", "beams", "beams-two", "sampling", "prefill-chunks", "processors"],
)
def test_tokens_are_the_uncached_ones(each, batch, options):
    options = dict(options)
    chunks = {"prefill_chunk_size": options.pop("prefill_chunk_size")} if "prefill_chunk_size" in options else {}
    theirs, _ = both(each, *batch, **options)
    if chunks:
        ids, mask = batch
        ours = each[1].generate(ids, attention_mask=mask, **PLAIN, **options, **chunks)
    else:
        ours = _
    assert torch.equal(ours, theirs)


def test_assisted_decoding_as_target_and_as_assistant(each, batch):
    model, program = each
    ids = batch[0][2:]
    theirs, _ = both(each, ids, do_sample=False, max_new_tokens=20)
    other = program.for_generation()
    ours = program.generate(ids, assistant_model=other, do_sample=False, max_new_tokens=20, **PLAIN)
    assert torch.equal(ours, theirs)
    # The eager model as target takes our program as its assistant.
    helped = model.generate(ids, assistant_model=other, do_sample=False, max_new_tokens=20, **PLAIN)
    assert torch.equal(helped, theirs)
    lookup = program.generate(ids, prompt_lookup_num_tokens=3, do_sample=False, max_new_tokens=20, **PLAIN)
    assert torch.equal(lookup, theirs)


def test_assistant_that_is_often_wrong_is_corrected(gemma3, batch):
    model, program = gemma3
    from layergraph.testing.zoo import tiny_model

    draft = tiny_model("gemma3_text", "lm", seed=7)
    theirs = model.generate(batch[0][2:], use_cache=False, do_sample=False, max_new_tokens=24, **PLAIN)
    ours = program.generate(batch[0][2:], assistant_model=draft, do_sample=False, max_new_tokens=24, **PLAIN)
    assert torch.equal(ours, theirs)


def test_streamers_and_stopping_criteria(qwen3, batch):
    class Collect(BaseStreamer):
        def __init__(self):
            self.seen, self.ended = [], False

        def put(self, value):
            self.seen.extend(value.flatten().tolist())

        def end(self):
            self.ended = True

    class StopAt(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 13)

    _, program = qwen3
    streamer = Collect()
    criteria = StoppingCriteriaList([StopAt(), MaxLengthCriteria(40)])
    ids = batch[0][2:]
    tokens = program.generate(
        ids, streamer=streamer, stopping_criteria=criteria, do_sample=False, max_new_tokens=30, **PLAIN
    )
    assert tokens.shape[1] == 13 and streamer.ended and streamer.seen == tokens[0].tolist()


def test_scores_and_hidden_states_have_transformers_own_nesting(each, batch):
    model, program = each
    tapped = program.apply(lg.TapOutputs("hidden_states"))
    ids, mask = batch
    options = {"do_sample": False, "max_new_tokens": 4, "attention_mask": mask, **PLAIN}
    options |= {"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True}
    theirs, ours = model.generate(ids, **options), tapped.generate(ids, **options)
    assert torch.equal(ours.sequences, theirs.sequences) and len(ours.scores) == 4
    for mine, wanted in zip(ours.scores, theirs.scores, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)
    assert len(ours.hidden_states) == 4
    for step, (mine, wanted) in enumerate(zip(ours.hidden_states, theirs.hidden_states, strict=True)):
        assert len(mine) == len(wanted) == 3
        for a, b in zip(mine, wanted, strict=True):
            real = mask.bool() if step == 0 else torch.ones(3, 1, dtype=torch.bool)
            assert a.shape == b.shape
            torch.testing.assert_close(a[real], b[real], rtol=1e-5, atol=1e-5)
    assert isinstance(ours.past_key_values if "past_key_values" in ours else ours.cache, DualCache)
    with pytest.raises(InputError, match="returns no hidden_states"):
        program.generate(ids, **options)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_conversation_goes_on_from_the_cache_that_was_returned(each, batch, name):
    """Under both names that transformers has had for it."""
    model, program = each
    ids, mask = batch
    first = program.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=5, **PLAIN)
    options = {"do_sample": False, "max_new_tokens": 5, "return_dict_in_generate": True, **PLAIN}
    result = program.generate(ids, attention_mask=mask, **options)
    assert torch.equal(result.sequences, first)
    cache = result.get("cache", result.get("past_key_values"))
    said = torch.cat([first, torch.randint(3, 90, (3, 4))], dim=1)
    whole = torch.nn.functional.pad(mask, (0, said.shape[1] - mask.shape[1]), value=1)
    theirs = model.generate(said, attention_mask=whole, use_cache=False, do_sample=False, max_new_tokens=6, **PLAIN)
    ours = program.generate(said, attention_mask=whole, do_sample=False, max_new_tokens=6, **PLAIN, **{name: cache})
    assert torch.equal(ours, theirs)


def test_prompts_may_be_embeddings(each, batch):
    model, program = each
    ids, mask = batch
    embeds = model.get_input_embeddings()(ids).detach()
    theirs, _ = both(each, ids, mask, do_sample=False, max_new_tokens=6)
    ours = program.generate(inputs_embeds=embeds, attention_mask=mask, do_sample=False, max_new_tokens=6, **PLAIN)
    assert torch.equal(ours, theirs[:, 9:])


def test_without_a_cache_it_is_the_uncached_graph(qwen3, batch):
    model, program = qwen3
    ids, mask = batch
    options = {"attention_mask": mask, "use_cache": False, "do_sample": False, "max_new_tokens": 3, **PLAIN}
    assert torch.equal(program.generate(ids, **options), model.generate(ids, **options))


def test_a_foreign_cache_is_refused(qwen3, batch):
    from transformers import DynamicCache

    model, program = qwen3
    with pytest.raises(InputError, match="a cache of its own kind"):
        program.generate(batch[0], cache=DynamicCache(config=model.config), max_new_tokens=2, **PLAIN)
    with pytest.raises(NotSupportedError, match="written by a layergraph program"):
        model(input_ids=batch[0], **{CACHE_NAME: DualCache(program)}, use_cache=True)
