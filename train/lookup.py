"""Prompt lookup: draft by copying what followed the last tokens when they last occurred. A baseline without a model.

As transformers' and vLLM's n-gram drafting: the longest suffix of the text that occurred before wins, here at its
latest occurrence. Unlike theirs, the copy may run on into itself (as in LZ77): a loop of two tokens is drafted for as
long as one likes. A trained drafter that does not beat it on the same text proves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 4  # tokens of the suffix looked for, then 3, 2, 1


def lookup_accepts(
    prompt: Sequence[int], answer: Sequence[int], *, drafts: int = 15, longest: int = LONGEST
) -> list[int]:
    """Accepted drafts of every verify while greedy decoding writes ``answer``, with at most ``drafts`` a verify.

    The answer's first token is the prefill's, as when served. The last verify counts up to the answer's end.
    """
    text = [*prompt, *answer]
    seen: list[dict[tuple[int, ...], int]] = [{} for _ in range(longest + 1)]
    noted = 0  # suffixes that end before this place are in ``seen``
    accepts = []
    at = len(prompt) + 1
    while at < len(text):
        for end in range(noted + 1, at):
            for n in range(1, min(longest, end) + 1):
                seen[n][tuple(text[end - n : end])] = end
        noted = at - 1
        accepted = 0
        for n in range(min(longest, at), 0, -1):
            source = seen[n].get(tuple(text[at - n : at]))
            if source is not None:
                # Past ``at`` the copy is of drafts, which equal the text as long as they are accepted.
                for draft, truth in zip(text[source : source + drafts], text[at:], strict=False):
                    if draft != truth:
                        break
                    accepted += 1
                break
        accepts.append(accepted)
        at += accepted + 1
    return accepts
