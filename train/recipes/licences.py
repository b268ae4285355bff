"""Which distributions the corpus may take text from: permissive licences only, read from their own metadata."""

from __future__ import annotations

import re
from email.message import Message

# SPDX ids whose only conditions are notices. The weak copyleft ones (MPL, LGPL, EPL) are left out on purpose.
PERMISSIVE = frozenset(
    [
        "0BSD",
        "Apache-2.0",
        "BSD",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "BSL-1.0",
        "CC0-1.0",
        "CNRI-Python",
        "HPND",
        "ISC",
        "MIT",
        "MIT-0",
        "MIT-CMU",
        "PSF-2.0",
        "Python-2.0",
        "Unlicense",
        "Zlib",
    ]
)
_EXCEPTIONS = frozenset({"LLVM-exception"})  # each only widens what the licence allows
_CLASSIFIERS = {
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Python Software Foundation License": "PSF-2.0",
}
# What the free-text field says where a distribution has neither an expression nor a classifier.
_NAMES = {
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache-2.0": "Apache-2.0",
    "bsd": "BSD",
    "bsd 3-clause": "BSD-3-Clause",
    "bsd 3-clause license": "BSD-3-Clause",
    "bsd-3-clause": "BSD-3-Clause",
    "3-clause bsd license": "BSD-3-Clause",
    "isc license": "ISC",
    "mit": "MIT",
    "mit license": "MIT",
}
_FOREIGN = re.compile(
    r"GNU (?:Lesser |Affero |Library )?General Public|\b(?:A|L)?GPL(?:-|v| )?[23]|Mozilla Public License"
    r"|Creative Commons Attribution|CC[- ]BY|All rights reserved\.\s*Proprietary",
    re.IGNORECASE,
)


def permits(expression: str) -> bool:
    """True if an SPDX expression leaves only permissive licences: every AND, some OR; AND binds closer than OR."""
    tokens = re.findall(r"[()]|[^\s()]+", expression)
    value, rest = _either(tokens)
    return value and not rest


def _either(tokens: list[str]) -> tuple[bool, list[str]]:
    value, tokens = _both(tokens)
    while tokens and tokens[0].upper() == "OR":
        right, tokens = _both(tokens[1:])
        value = value or right
    return value, tokens


def _both(tokens: list[str]) -> tuple[bool, list[str]]:
    value, tokens = _one(tokens)
    while tokens and tokens[0].upper() == "AND":
        right, tokens = _one(tokens[1:])
        value = value and right
    return value, tokens


def _one(tokens: list[str]) -> tuple[bool, list[str]]:
    if not tokens:
        return False, []
    if tokens[0] == "(":
        value, tokens = _either(tokens[1:])
        return (value, tokens[1:]) if tokens[:1] == [")"] else (False, tokens)
    value, tokens = tokens[0] in PERMISSIVE, tokens[1:]
    if tokens[:1] and tokens[0].upper() == "WITH":
        value, tokens = value and tokens[1:2] != [] and tokens[1] in _EXCEPTIONS, tokens[2:]
    return value, tokens


def licence_of(metadata: Message) -> str:
    """The licence that a distribution's metadata names: its expression, else classifiers, else the free text.

    Returns SPDX ids joined by AND; an empty string if nothing usable is said (several classifiers mean AND: which of
    them may be chosen is not said).
    """
    expression = metadata.get("License-Expression")
    if expression:
        return str(expression)
    said = [
        str(c).split("::")[-1].strip() for c in metadata.get_all("Classifier", []) if str(c).startswith("License ::")
    ]
    said = [c for c in said if c != "OSI Approved"]
    if said:
        return " AND ".join(sorted({_CLASSIFIERS.get(c, c.replace(" ", "-")) for c in said}))
    return _NAMES.get(str(metadata.get("License") or "").strip().lower(), "")


def names_other_licence(text: str) -> bool:
    """True if the head of a file puts it under a licence that is not permissive, whatever its distribution says."""
    return _FOREIGN.search(text[:3000]) is not None
