"""Prompt lookup counts what a copy-from-before drafter would get; loops are found exactly, and only at the end."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.train.lookup import lookup_accepts
from sglang_dflash.train.loops import is_looping, loop_start
from sglang_dflash.train.served import Counts

tokens = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def naive_accepts(prompt: list[int], answer: list[int], drafts: int, longest: int) -> list[int]:
    """Search the whole text again at every verify."""
    text, at, accepts = prompt + answer, len(prompt) + 1, []
    while at < len(text):
        draft: list[int] = []
        for n in range(min(longest, at - 1), 0, -1):
            ends = [end for end in range(n, at) if text[end - n : end] == text[at - n : at]]
            if ends:
                while len(draft) < drafts:
                    draft.append((text[:at] + draft)[max(ends) + len(draft)])
                break
        accepted = 0
        while accepted < len(draft) and at + accepted < len(text) and draft[accepted] == text[at + accepted]:
            accepted += 1
        accepts.append(accepted)
        at += accepted + 1
    return accepts


@given(tokens, tokens, st.integers(1, 6), st.integers(1, 4))
def test_lookup_is_the_naive_search(prompt: list[int], answer: list[int], drafts: int, longest: int) -> None:
    found = lookup_accepts(prompt, answer, drafts=drafts, longest=longest)
    assert found == naive_accepts(prompt, answer, drafts, longest)
    # Every token of the answer but the prefill's is committed by exactly one verify; only the last may be cut.
    committed = sum(found) + len(found)
    assert len(answer) - 1 <= committed <= len(answer)


def test_lookup_by_hand() -> None:
    # 7 comes of the prefill; after it, 8 9 1 stood before and are copied, then nothing fits.
    assert lookup_accepts([7, 8, 9, 1, 2, 3], [7, 8, 9, 1, 5, 6], drafts=3) == [3, 0]
    assert lookup_accepts([7, 8, 9, 1, 2, 3], [7, 8, 9, 1, 5, 6], drafts=2) == [2, 0, 0]
    # The longer suffix wins over a later shorter one.
    assert lookup_accepts([1, 2, 5, 9, 2, 6, 1], [2, 5, 9], drafts=2) == [2]
    assert lookup_accepts([1], [2]) == []
    # Through the copy itself: 4 5 4 5 ... from one 4 5 4.
    assert lookup_accepts([4, 5], [4, 5, 4, 5, 4, 5, 4, 6], drafts=9) == [6]
    assert lookup_accepts([4, 5], [4, 5, 4, 5, 4, 5, 4, 6], drafts=4) == [4, 1]


def test_counts_are_pooled() -> None:
    counts = Counts.of([0, 3, 3]) + Counts.of([1])
    assert (counts.verifies, counts.accepted, counts.histogram) == (4, 7, (1, 1, 0, 2))
    assert counts.tau == pytest.approx(1 + 7 / 4)
    assert counts.acceptance == [0.75, 0.5, 0.5]
    assert Counts().tau is None
    assert (Counts() + Counts.of([2])).histogram == Counts.of([2]).histogram


@given(tokens, st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(3, 9), st.integers(0, 11))
def test_a_repeated_tail_is_a_loop(before: list[int], stretch: list[int], times: int, more: int) -> None:
    tail = (stretch * (times + 1))[: len(stretch) * times + more % len(stretch)]
    start = loop_start(before + tail, shortest=3)
    assert start is not None
    assert start <= len(before)
    # What is claimed to repeat does, from its first token on.
    text = (before + tail)[start:]
    assert any(text[p:] == text[:-p] for p in range(1, len(text) // 3 + 1))


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ([1, 2, 3] + [7, 8] * 12, 3),
        ([1, 2, 3] + [7, 8] * 11 + [7], None),  # 23 tokens
        ([7, 8] * 12 + [9], None),  # it left
        (list(range(100)), None),
        ([5] * 24, 0),
        (list(range(12)) * 2, None),  # twice is a repetition
        (list(range(12)) * 3, 0),
        ([], None),
    ],
)
def test_loops_by_hand(text: list[int], start: int | None) -> None:
    assert loop_start(text) == start
    assert is_looping(text) is (start is not None)


def test_a_loop_starts_as_early_as_it_can() -> None:
    text = [0, 1, *([2, 3, 4] * 10)]
    assert loop_start(text) == 2
    assert all(a != b for a, b in pairwise(text[:3]))
