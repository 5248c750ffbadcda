"""What `n` answers to one prompt hold together."""

from __future__ import annotations

from asyncinfer.testing import FakeModel, InlineEngine


def test_answers_that_wait_hold_one_prompt() -> None:
    engine = InlineEngine(FakeModel(max_context=4096), max_running=2, block_size=16)
    stream = engine.submit([7] * 2000, n=64, max_tokens=2, temperature=0.0)
    sequences = [answer.sequence for answer in stream.request.outputs]
    assert len({id(sequence.tokens) for sequence in sequences}) == 1
    assert len({id(sequence.keys) for sequence in sequences}) == 1
    assert len(sequences[0].keys) == 2000 // 16
    engine.run()
    stream.read()
    assert len({tuple(stream.token_ids(index)) for index in range(64)}) == 1
    assert len(sequences[0].tokens) == 2002


def test_each_answer_is_found_again() -> None:
    """Its blocks have keys of their own."""
    engine = InlineEngine(FakeModel(blocks=64), block_size=4)
    prompt = [*range(10)]
    stream = engine.submit(prompt, n=3, max_tokens=20, seed=3, ignore_eos=True)
    engine.run()
    stream.read()
    answers = [tuple(stream.token_ids(index)) for index in range(3)]
    assert len({answer[:4] for answer in answers}) == 3
    for answer in answers:
        again = engine.submit([*prompt, *answer], max_tokens=1)
        engine.run()
        outcome = again.request.buffer.outcome
        assert outcome is not None
        # All that was computed, in whole blocks.
        assert outcome.usage.cached_tokens == 28
