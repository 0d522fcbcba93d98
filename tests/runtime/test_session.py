"""Stepping a program by hand: row C7, embeddings, taps, threads, saving, errors. Oracle: the eager model, uncached."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import layergraph as lg
from layergraph.errors import InputError, NotSupportedError
from layergraph.runtime import DualCache
from layergraph.runtime.cache import CHUNK

# fp32, logits of order one: single steps and whole texts add up in another order.
CLOSE = {"rtol": 0, "atol": 1e-5}


def run(session, ids, mask=None, sizes=(9,), **options):
    """Logits of all tokens, written in pieces of the given sizes."""
    outputs, first = [], 0
    for size in sizes:
        part = slice(first, first + size)
        given = None if mask is None else mask[:, part]
        outputs.append(session.step(ids[:, part], given, logits_to_keep=0, **options)["logits"])
        first += size
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("sizes", [(9,), (4, 4, 1), (1,) * 9], ids=["whole", "chunks", "singles"])
def test_left_padding_and_chunks(each, batch, reference, sizes):
    model, program = each
    ids, mask = batch
    logits = run(program.session(), ids, mask, sizes)
    real = mask.bool()
    torch.testing.assert_close(logits[real], reference(model, ids, mask)[real], **CLOSE)


def test_right_padding_and_rows_at_their_own_lengths(each, reference):
    model, program = each
    ids = torch.randint(3, 90, (2, 12))
    mask = torch.ones_like(ids)
    mask[0, 3:9], mask[1, 6:8] = 0, 0  # both go on at different lengths
    logits = run(program.session(), ids, mask, (5, 4, 1, 1, 1))
    for row in range(2):
        real = mask[row].bool()
        alone = reference(model, ids[row : row + 1, real])[0]
        torch.testing.assert_close(logits[row, real], alone, **CLOSE)


def test_a_prompt_longer_than_windows_hold_is_written_in_pieces(gemma3, reference):
    model, program = gemma3
    ids = torch.randint(3, 90, (2, CHUNK + 70))[:, : model.config.max_position_embeddings * 2]
    session = program.session(capacity=16)
    logits = run(session, ids, None, (ids.shape[1],))
    torch.testing.assert_close(logits, reference(model, ids), **CLOSE)
    few = torch.tensor([0, CHUNK - 1, CHUNK, -1])
    session.cache.reset()
    torch.testing.assert_close(session.step(ids, logits_to_keep=few)["logits"], logits[:, few], rtol=0, atol=0)


def test_logits_to_keep_counts_from_the_end_or_names_tokens(qwen3, batch):
    _, program = qwen3
    ids, mask = batch
    whole = run(program.session(), ids, mask)
    chosen = torch.tensor([2, 7])
    for keep, wanted in ((1, whole[:, -1:]), (3, whole[:, -3:]), (chosen, whole[:, chosen])):
        logits = program.session().step(ids, mask, logits_to_keep=keep)["logits"]
        # The head's product over fewer tokens is another shape for the BLAS: last bits may differ.
        torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-6)


def test_embeddings_are_ids_looked_up_and_may_be_mixed_with_them(each, batch):
    model, program = each
    ids, mask = batch
    embeds = model.get_input_embeddings()(ids).detach()
    wanted = run(program.session(), ids, mask)
    session = program.session()
    given = session.step(inputs_embeds=embeds, attention_mask=mask, logits_to_keep=0)["logits"]
    assert torch.equal(given, wanted)
    mixed = ids.clone()
    mixed[:, 3:6] = -1
    logits = program.session().step(mixed, mask, logits_to_keep=0, inputs_embeds=embeds)["logits"]
    assert torch.equal(logits, wanted)
    with pytest.raises(InputError, match="inputs_embeds do not fit"):
        session.step(inputs_embeds=embeds[..., :5])
    with pytest.raises(InputError, match="disagree"):
        session.step(ids[:, :2], inputs_embeds=embeds)


def test_positions_may_be_given(qwen3, batch, reference):
    model, program = qwen3
    ids, _ = batch
    place = torch.arange(9)[None] + 7
    with torch.no_grad():
        wanted = model(input_ids=ids, position_ids=place.expand(3, -1), use_cache=False).logits
    torch.testing.assert_close(run(program.session(), ids, position_ids=place), wanted, **CLOSE)


def test_eight_threads_on_one_program_are_bit_equal_to_one_after_the_other(each):
    _, program = each
    prompts = [torch.randint(3, 90, (1 + number % 3, 6)) for number in range(8)]

    def talk(ids):
        session = program.session()
        return [session.step(part)["logits"] for part in (ids, ids[:, :1], ids[:, 2:5], ids[:, 4:5])]

    alone = [talk(ids) for ids in prompts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(talk, prompts))
    for one, other in zip(alone, together, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_saved_program_goes_on_where_it_was(each, batch, tmp_path):
    _, program = each
    ids, mask = batch
    loaded = lg.load(program.save(tmp_path / "saved"))
    assert loaded.ir["step"].cache == program.ir["step"].cache
    cache = DualCache(program)
    program.session(cache=cache).step(ids, mask)
    wanted = program.session(cache=cache).step(ids[:, :1])["logits"]
    cache.crop(-1)
    assert torch.equal(loaded.session(cache=cache).step(ids[:, :1])["logits"], wanted)


def test_taps_come_with_every_step_and_pieces_are_joined(gemma3, reference):
    model, program = gemma3
    tapped = program.apply(lg.TapOutputs("hidden_states"))
    ids = torch.randint(3, 90, (2, CHUNK + 3))
    outputs = tapped.session().step(ids)
    with torch.no_grad():
        wanted = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    for number, state in enumerate(wanted):
        torch.testing.assert_close(outputs[f"hidden_states.{number}"], state, rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_named_and_the_cache_stays(qwen3, batch):
    _, program = qwen3
    ids, mask = batch
    session = program.session(cache=DualCache(program, capacity=10, fixed=True))
    session.step(ids, mask)
    before = session.step(ids[:, :1])["logits"]
    session.cache.crop(-1)
    for message, arguments in {
        "no token to write": (ids[:, :0],),
        "another number of rows": (ids[:2],),
        "the cache is full": (ids[:, :2],),
        "attention_mask does not fit": (ids[:, :1], mask[:, :4]),
        "attention_mask says otherwise": (ids[:, :1], torch.ones(3, 10)),
        "position_ids do not fit": (ids[:, :1], None, torch.zeros(3, 2)),
        "input_ids have no rows": (ids[0],),
    }.items():
        with pytest.raises(InputError, match=message):
            session.step(*arguments)
    with pytest.raises(InputError, match="there is no token"):
        session.step()
    assert session.cache.length == 9 and torch.equal(session.step(ids[:, :1])["logits"], before)


def test_a_step_that_fails_half_way_leaves_a_cache_that_says_so(qwen3, batch, monkeypatch):
    _, program = qwen3
    session = program.session()
    session.step(batch[0])
    monkeypatch.setattr(session, "_run_graph", lambda *_: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        session.step(batch[0])
    monkeypatch.undo()
    with pytest.raises(InputError, match="failed half-way"):
        session.step(batch[0])
    session.cache.reset()
    session.step(batch[0])


def test_a_program_without_a_cached_graph_says_why(qwen3):
    model, _ = qwen3
    uncached = lg.trace(model, cached=False)
    with pytest.raises((NotSupportedError, lg.LayerGraphError), match="no cached graph"):
        uncached.session()
