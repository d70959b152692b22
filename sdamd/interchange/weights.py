r"""How other tools write weights in prompts, and the same in sdamd's prompt language.

    ComfyUI, Fooocus   (x) is 1.1, (x:1.3) is 1.3 and replaces all weights around; [x] is text
    NovelAI            {x} is 1.05, [x] is 1/1.05, 1.3::x:: is 1.3; (x) is text
    InvokeAI           x+ and (x)+ are 1.1, x- is 0.9, (x)1.3 is 1.3; (x) is x

What is text there is escaped, so that it is text here: a lone backslash stands for nothing in
sdamd, which parts `AND`, `BREAK` and `<lora:..>` into mere letters.
"""

import math
import re
from collections.abc import Iterable, Iterator
from itertools import groupby

from sdamd import prompt as language
from sdamd.prompt import MORE, Fragment

_SPECIAL = re.compile(r"[\\()\[\]]")
_WORD = re.compile(r"\b(A)(ND)\b|\b(B)(REAK)\b")
_TAG = re.compile(r"<(?=[A-Za-z]\w*:[^<>]+>)")
_ENDS_IN_WEIGHT = re.compile(r":\s*[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*\Z")
_DEEPEST = 64
"""Brackets nested deeper are read as text; more would take time without meaning anything."""


def write(fragments: Iterable[Fragment]) -> str:
    """Words and their weights as a prompt of sdamd; `BREAK` among them is text."""
    runs = groupby((f for f in fragments if f.text), key=lambda f: f.weight)
    merged = [Fragment(text="".join(f.text for f in run), weight=w) for w, run in runs]
    written = [_written(fragment) for fragment in merged]
    if merged and merged[-1].weight == 1 and _ENDS_IN_WEIGHT.search(written[-1]):
        written[-1] = f"({written[-1]}:1)"  # else it would be the weight of the whole prompt
    return "".join(written)


def _written(fragment: Fragment) -> str:
    text = escape(fragment.text)
    if fragment.weight == 1:
        return text
    weight = max(-language.WEIGHT_MAX, min(language.WEIGHT_MAX, fragment.weight))
    number = f"{weight:.8f}".rstrip("0").rstrip(".")
    return f"({text}:{number})"


def escape(text: str) -> str:
    """Write a text so that sdamd reads it as that text, whatever is in it."""
    text = _SPECIAL.sub(r"\\\g<0>", text)
    text = _WORD.sub(lambda m: f"{m[1] or m[3]}\\{m[2] or m[4]}", text)
    return _TAG.sub(r"<\\", text)


def _kept(text: str, fragments: list[Fragment]) -> str:
    """The text itself where it means here what it means there, else written anew."""
    part, *others = language.subprompts(text)
    plain = not others and part.weight == 1 and not language.extra_networks(text)[1]
    if plain and "[" not in text:
        here = list(language.parse_weights(text))
        there = [
            Fragment(text="".join(f.text for f in run), weight=w)
            for w, run in groupby((f for f in fragments if f.text), key=lambda f: f.weight)
        ]
        if len(here) == len(there) and all(
            a.text == b.text and math.isclose(a.weight, b.weight, rel_tol=1e-6)
            for a, b in zip(here, there, strict=True)
        ):
            return text
    return write(fragments)


# -- ComfyUI -------------------------------------------------------------------------------------

_EMBEDDING = re.compile(r"\bembedding:([\w./\\-]+)")


def from_comfyui(text: str) -> str:
    """A prompt of ComfyUI's or Fooocus's text encoders in sdamd's language."""
    return _kept(text, [Fragment(text=t, weight=w) for t, w in _comfyui(text, 1.0, 0)])


def embeddings(text: str) -> list[str]:
    """The textual inversions that a prompt of ComfyUI names, each once."""
    return list(dict.fromkeys(_EMBEDDING.findall(text)))


def _comfyui(text: str, weight: float, depth: int) -> Iterator[tuple[str, float]]:
    for item in _items(text):
        inner = item[1:-1] if len(item) >= 2 and item[0] == "(" and item[-1] == ")" else None
        if inner is None or item.endswith("\\)") or depth == _DEEPEST:
            yield re.sub(r"\\([()])", r"\1", item), weight
            continue
        head, colon, number = inner.rpartition(":")
        explicit = _number(number) if colon and head else None
        if explicit is None:
            yield from _comfyui(inner, weight * MORE, depth + 1)
        else:
            yield from _comfyui(head, explicit, depth + 1)


def _items(text: str) -> Iterator[str]:
    """Cut at the outermost brackets; one that is not closed goes to the end."""
    level = start = 0
    for mark in re.finditer(r"\\[()]|[()]", text):
        if mark[0] == "(":
            if level == 0:
                if mark.start() > start:
                    yield text[start : mark.start()]
                start = mark.start()
            level += 1
        elif mark[0] == ")":
            level -= 1
            if level == 0:
                yield text[start : mark.end()]
                start = mark.end()
    if start < len(text):
        yield text[start:]


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


# -- NovelAI -------------------------------------------------------------------------------------

_NOVELAI_MORE = 1.05
_NOVELAI = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?)::|::|[{}\[\]]|[^{}\[\]:0-9-]+|.", re.DOTALL)


def from_novelai(text: str) -> str:
    """A prompt of NovelAI in sdamd's language."""
    return _kept(text, list(_novelai(text)))


def _novelai(text: str) -> Iterator[Fragment]:
    curly = square = 0
    number: float | None = None
    for piece in _NOVELAI.finditer(text):
        mark = piece[0]
        if piece[1]:
            number = float(piece[1])
        elif mark == "::" and number is not None:
            number = None
        elif mark == "{":
            curly += 1
        elif mark == "[":
            square += 1
        elif mark == "}" and curly:
            curly -= 1
        elif mark == "]" and square:
            square -= 1
        else:
            level = max(-100, min(100, curly - square))
            factor = 1.0 if number is None else number
            yield Fragment(text=mark, weight=round(factor * _NOVELAI_MORE**level, 8))


# -- InvokeAI ------------------------------------------------------------------------------------

_COMPEL = re.compile(
    r"\\(?P<escaped>.)|(?P<open>\()|\)(?P<close>\++|-+|[0-9]*\.?[0-9]+|)|(?P<blank>\s+)"
    r"|(?P<word>[^\s()\\]+)",
    re.DOTALL,
)
_COMPEL_WORD = re.compile(r"(?P<stem>.*\w)(?P<sign>\++|-+)(?P<after>[.,;:!?'\"]*)", re.DOTALL)
_COMPEL_CALL = re.compile(r"\)\s*\.\s*(blend|and|swap)\s*\(")
_COMPEL_LESS = 0.9


def from_invokeai(text: str) -> tuple[str, list[str]]:
    """A prompt of InvokeAI in sdamd's language, and what of it cannot be said there."""
    if call := _COMPEL_CALL.search(text):
        return text, [f".{call[1]}() in the prompt is not understood and stands for itself"]
    fragments = list(_compel(text))
    problems = []
    if any(f.weight < 1 for f in fragments):
        problems.append("a weight below 1 is reached by another way in InvokeAI: it comes near")
    return _kept(text, fragments), problems


def _compel(text: str) -> Iterator[Fragment]:
    pieces = list(_COMPEL.finditer(text))
    factors, closes = _compel_brackets(pieces)
    weights = [1.0]
    for number, piece in enumerate(pieces):
        if number in factors:
            weights.append(weights[-1] * factors[number])
        elif number in closes:
            weights.pop()
        elif word := piece["word"] and _COMPEL_WORD.fullmatch(piece[0]):
            factor = _compel_factor(word["sign"])
            yield Fragment(text=word["stem"], weight=round(weights[-1] * factor, 8))
            yield Fragment(text=word["after"], weight=round(weights[-1], 8))
        else:
            shown = piece["escaped"] or piece[0]
            yield Fragment(text=shown, weight=round(weights[-1], 8))


def _compel_brackets(pieces: list[re.Match[str]]) -> tuple[dict[int, float], set[int]]:
    """The factor of each opening bracket that is closed, and which pieces close one."""
    factors: dict[int, float] = {}
    closes: set[int] = set()
    opened: list[int] = []
    for number, piece in enumerate(pieces):
        if piece["open"]:
            opened.append(number)
        elif piece["close"] is not None and opened:
            factors[opened.pop()] = _compel_factor(piece["close"])
            closes.add(number)
    return factors, closes


def _compel_factor(sign: str) -> float:
    if sign.startswith("+"):
        return MORE ** min(len(sign), 100)
    if sign.startswith("-"):
        return _COMPEL_LESS ** min(len(sign), 100)
    return float(sign) if sign else 1.0
