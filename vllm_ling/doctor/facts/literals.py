# SPDX-License-Identifier: Apache-2.0
"""Python literals as a log prints them, enum members included; nothing is executed."""

import ast
import re
import warnings
from typing import Any

_TEXT = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
# A string, left as it is (an open one reaches to the end, so that it is looked at once), or a member of an enum or of
# flags: `<CUDAGraphMode.FULL_DECODE_ONLY: (2, 0)>`, `<Parts.A|B: 3>`, `<Parts: 0>` for no flag.
_MEMBER = re.compile(rf"""(?P<text>{_TEXT}|['"].*)|<\w+(?:\.(?P<name>[\w|]+))?: (?:[^<>'"]|{_TEXT})*>""")


def literal(text: str) -> Any:
    """A Python literal, as `ast.literal_eval` raises or returns it, without the warnings that odd ones print.

    vLLM prints an enum member, as in its compilation config, in angle brackets, which is no literal; it becomes its
    name, and flags of which none is set the empty string.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.literal_eval(text)
        except SyntaxError:
            return ast.literal_eval(_MEMBER.sub(_named, text))


def _named(match: re.Match[str]) -> str:
    return match["text"] or repr(match["name"] or "")
