# SPDX-License-Identifier: Apache-2.0
"""CUDA sources as C++: inline assembler becomes calls of runtime/ptx.h, shared memory comes from the emulator."""

import re
from collections.abc import Iterator

_ASM = re.compile(r"\basm\b(?:\s+volatile)?\s*(?=\()")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_OPENING, _CLOSING = "([{", ")]}"


class TranslationError(ValueError):
    """The source uses a form that the emulator does not know."""


def translate(source: str) -> str:
    """One .cu or .cuh file as C++ for runtime/builtins.h.

    Raises:
        TranslationError: inline assembler or shared memory in an unknown form.
    """
    out, at = [], 0
    for found in _ASM.finditer(source):
        end = _closing(source, found.end())
        out += [source[at : found.start()], assembler(source[found.end() + 1 : end])]
        at = end + 1
    text = "".join([*out, source[at:]])
    text = re.sub(
        r"extern __shared__ (\w+) (\w+)\[\];",
        r"\1 *\2 = (\1 *)emulator::dynamic_memory();",
        text,
    )
    text, count = re.subn(
        r"__shared__ (\w+) (\w+);", r"\1 &\2 = *(\1 *)emulator::static_memory(sizeof(\1));", text
    )
    if count > 1 or "__shared__" in text:
        raise TranslationError("one variable in shared memory is what is emulated")
    return text


def assembler(inside: str) -> str:
    """What stands between the parentheses of an asm statement, as a C++ statement without its semicolon."""
    template, *lists = _split(inside, ":")
    code = "".join(found[1] for found in _STRING.finditer(template)).replace("\\n", "\n").strip()
    operands = [_operand(text) for part in lists[:2] for text in _split(part, ",") if text.strip()]
    if code.startswith("{"):
        code = code[1 : code.rindex("}")]
    statements = [_instruction(text.strip(), operands) for text in code.split(";") if text.strip()]
    return "{ " + " ".join(statements) + " }"


def _instruction(text: str, operands: list[str]) -> str:
    if declared := re.fullmatch(r"\.reg \.(pred|b64) ([\w, ]+)", text):
        names = ", ".join(_register(name.strip()) for name in declared[2].split(","))
        return f"{'bool' if declared[1] == 'pred' else 'emulator::Word'} {names};"
    found = re.fullmatch(r"(?:@(\w+)\s+)?([a-z][\w.:]*)\s*(.*)", text, re.DOTALL)
    if found is None:
        raise TranslationError(f"not an instruction: {text}")
    condition, name, rest = found.groups()
    values = [
        f"({operands[int(value[1:])]})"
        if value[0] == "%"
        else value
        if value[0].isdigit()
        else _register(value)
        for value in re.sub(r"[{}\[\]\s]", "", rest).split(",")
        if value and value != "_"
    ]
    call = f"ptx::{re.sub(r'[.:]+', '_', name)}({', '.join(values)});"
    return f"if ({_register(condition)}) {call}" if condition else call


def _register(name: str) -> str:
    """Away from the names of C++ around it."""
    return f"register_{name}"


def _operand(text: str) -> str:
    found = re.fullmatch(r'\s*"[=+]?[a-z]"\s*\((.*)\)\s*', text, re.DOTALL)
    if found is None:
        raise TranslationError(f"not an operand: {text}")
    return found[1]


def _closing(text: str, opening: int) -> int:
    """Where the parenthesis at `opening` is closed."""
    depth = 0
    for at, character in _outside_strings(text, opening):
        depth += (character in _OPENING) - (character in _CLOSING)
        if depth == 0:
            return at
    raise TranslationError(f"unbalanced: {text[opening : opening + 60]}")


def _split(text: str, separator: str) -> list[str]:
    """Parts between separators that lie in no parentheses or strings."""
    parts, begin, depth = [], 0, 0
    for at, character in _outside_strings(text, 0):
        depth += (character in _OPENING) - (character in _CLOSING)
        if character == separator and depth == 0:
            parts.append(text[begin:at])
            begin = at + 1
    return [*parts, text[begin:]]


def _outside_strings(text: str, begin: int) -> Iterator[tuple[int, str]]:
    quoted = skip = False
    for at in range(begin, len(text)):
        if skip:
            skip = False
        elif text[at] == "\\":
            skip = True
        elif text[at] == '"':
            quoted = not quoted
        elif not quoted:
            yield at, text[at]
