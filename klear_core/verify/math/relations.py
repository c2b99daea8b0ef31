"""Read inequalities, sets and named values from text, and list the pairs that algebra must compare.

`x>3` means the same as `(3,\\infty)`, `x=1 or x=2` the same as `1,2`, but neither `>4` nor `\\neq 4` means 4.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations, product
from typing import Literal

from klear_core.verify.math.numbers import is_numeric

_SIGN = re.compile(r"\\(?:le|ge|neq|in)(?![a-zA-Z])|[<>]")
_NAME = r"(?:\\?[A-Za-z]+'?(?:_\{?\w+\}?)?(?:\((?:\\?[A-Za-z]+|\d+)\))?)"
_NAMED = re.compile(rf"\s*({_NAME}|\((?:\s*{_NAME}\s*,)*\s*{_NAME}\s*\))\s*=(?!=)\s*(\S.*)", re.S)
_TUPLE_NAMED = re.compile(
    rf"\((?P<names>\s*{_NAME}(?:\s*,\s*{_NAME})+\s*)\)\s*=\s*\((?P<values>[^()]*(?:\([^()]*\)[^()]*)*)\)"
)
_OPPOSITE_TUPLES = re.compile(r"\\pm\s*\(([^(),]+),([^(),]+)\)")
_TUPLE_NAME = re.compile(rf"^\(\s*{_NAME}(?:\s*,\s*{_NAME})+\s*\)\s*=\s*(?=\()")
_MEMBER_NAME = re.compile(rf"{_NAME}|\(\s*{_NAME}(?:\s*,\s*{_NAME})+\s*\)")
_SIGN_OR_EQUAL = re.compile(r"\\(?:le|ge|neq)(?![a-zA-Z])|[<>=]")
_MAX_RELATIONS = 4
_IS_NAME = re.compile(_NAME)
CONNECTIVE = re.compile(
    r"\s*,?\s*(?:\\(?:text|mbox|textrm|mathrm)\s*\{\s*,?\s*(or|and)\s*\}"
    r"|(?<![A-Za-z\\{])(or|and)(?![A-Za-z}])|\\(lor|vee|land|wedge)(?![a-zA-Z])|;)\s*",
    re.I,
)
_SET_BUILDER = re.compile(
    rf"\\\{{\s*(?P<name>{_NAME})\s*(?:\\in\s*\\mathbb\s*\{{?R\}}?\s*)?"
    r"(?:\\mid(?![a-zA-Z])|:|\\?\|)\s*(?P<body>.*)\\\}",
    re.S,
)
_SET = re.compile(
    r"\s*(?:[(\[]|\\\{|\\mathbb|\\emptyset|\\varnothing|\\left)|.*\\(?:cup|cap|setminus)(?![a-zA-Z])", re.S
)
_FINITE_SET = re.compile(r"\s*\\\{[^{}|:]*,[^{}|:]*\\\}\s*")
_BRACKETS = re.compile(r"\\[{}]|[()\[\]{}]")
_ABSOLUTE = re.compile(rf"(?:\\l?vert|\\?\|)\s*({_NAME})\s*(?:\\r?vert|\\?\|)")
_EULER = re.compile(r"(?<![\\a-zA-Z])e(?![a-zA-Z])")
_UNKNOWNS = frozenset("xyzt")
_PARAMETERS = re.compile(
    r"(?:[\d+\-*/^(){}. ]|\\(?:frac|sqrt|ln|log)(?![a-zA-Z])|(?<![\\a-zA-Z])[a-nr-s](?![a-zA-Z]))+"
)
_FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", r"\neq": r"\neq"}
_MAX_PARTS = 16
_MOD = r"(?:\\(?:text|mathrm|operatorname)\s*\{\s*\(?\s*mod\s*\}|\\[pb]?mod(?![a-zA-Z])|(?<![\\A-Za-z])mod(?![A-Za-z]))"
_SHORT_INTEGER = re.compile(r"[+-]?\d{1,100}", re.ASCII)
_EQUIVALENT = re.compile(r"\\equiv(?![a-zA-Z])|≡")
_MODULUS = re.compile(
    rf"^(?P<sides>.+?)\s*,?\s*\(?\s*{_MOD}\s*\{{?(?P<modulus>(?:[^{{}}()=<>]|\{{[^{{}}]*\}})+)\}}?\s*\)?$", re.S
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """The statement that a text makes.

    `region`: numbers between bounds, as interval texts, one for each possible reading; `named`: a value for each of
    several names; `relation`: an inequality that is not a region; `plain`: a value, a list or anything else.
    """

    kind: Literal["plain", "region", "named", "relation"]
    texts: tuple[str, ...]
    names: tuple[str, ...] = ()
    source: str = ""
    """The text of a region or relation as it was written."""


@lru_cache(maxsize=4096)
def read_statement(text: str) -> Statement:
    """Return the statement that a normalised text makes."""
    text = _assigned(text)
    builder = _SET_BUILDER.fullmatch(text.strip())
    body = builder["body"].strip() if builder is not None else text
    parts, joints = _split(body)
    has_sign = any(_signs(part) for part in parts)
    if has_sign:
        found = _read_region(parts, joints) or _read_membership(parts) or Statement(kind="relation", texts=(text,))
        names = () if builder is not None else found.names
        return replace(found, source=text, names=names)
    if builder is not None or len(parts) == 1 or len(parts) > _MAX_PARTS:
        return Statement(kind="plain", texts=(text,))
    return _read_list(parts)


Alternatives = tuple[tuple[tuple[str, str], ...], ...]
"""Alternatives of (gold, answer) texts; an answer is right if all pairs of one alternative are equal."""


def compare_statements(gold: Statement, answer: Statement) -> Alternatives:
    """Return the texts that algebra must compare; empty if the statements differ in kind."""
    kinds = {gold.kind, answer.kind}
    if kinds == {"named"}:
        return _match_by_name(gold, answer)
    if kinds == {"named", "plain"}:
        return _match_in_order(gold, answer)
    if kinds == {"region"}:
        can_match = not gold.names or not answer.names or gold.names == answer.names
    elif kinds == {"region", "plain"}:
        plain = gold if gold.kind == "plain" else answer
        can_match = _SET.match(plain.texts[0]) is not None and _FINITE_SET.fullmatch(plain.texts[0]) is None
    else:
        can_match = kinds == {"plain"}
    if "relation" in kinds and kinds <= {"region", "relation"}:
        return _match_relations(gold.source, answer.source)
    if not can_match:
        return ()
    return tuple(((g, a),) for g, a in product(gold.texts, answer.texts))


def _match_by_name(gold: Statement, answer: Statement) -> Alternatives:
    """Match `x=1, y=2` with `y=2, x=1`: each name's value in the reference with its value in the answer."""
    if sorted(gold.names) != sorted(answer.names):
        return ()
    # the first value, should a name occur twice
    pairs = [
        (value, answer.texts[answer.names.index(name)]) for name, value in zip(gold.names, gold.texts, strict=True)
    ]
    return (tuple(pairs),)


def _match_in_order(gold: Statement, answer: Statement) -> Alternatives:
    """Match `b=-3, c=0` with `-3,0`: the values in the order written, or in the order of their names."""
    named, plain = (gold, answer) if gold.kind == "named" else (answer, gold)
    values = split_values(plain.texts[0])
    if len(values) != len(named.names):
        return ()
    spelled = [name.lstrip("\\") for name in named.names]  # `\theta` comes after `r`
    by_name = tuple(value for _, value in sorted(zip(spelled, named.texts, strict=True)))
    alternatives: list[tuple[tuple[str, str], ...]] = []
    for order in dict.fromkeys((named.texts, by_name)):
        golds, answers = (order, values) if named is gold else (values, order)
        alternatives.append(tuple(zip(golds, answers, strict=True)))
    return tuple(alternatives)


def _match_relations(gold: str, answer: str) -> Alternatives:
    """Match inequalities that are no region: `a<b<c` with `c>b>a` or with `a<b, b<c`, `x+y>3` with `3<y+x`."""
    gold_relations, answer_relations = _relations(gold), _relations(answer)
    if gold_relations is None or answer_relations is None or len(gold_relations) != len(answer_relations):
        return ()
    is_either = {"or" in _split(text)[1] for text in (gold, answer)}
    if len(gold_relations) > _MAX_RELATIONS or len(is_either) > 1:
        return ()
    alternatives: list[tuple[tuple[str, str], ...]] = []
    for order in permutations(answer_relations):
        pairs: list[tuple[str, str]] = []
        for (gold_left, gold_sign, gold_right), (left, sign, right) in zip(gold_relations, order, strict=True):
            if gold_sign != sign:
                break
            is_same = (_bare(gold_left), _bare(gold_right)) == (_bare(left), _bare(right))
            # both sides may be shifted: `x-3>0` is `x>3`
            differences = (rf"({gold_left})-({gold_right})", rf"({left})-({right})")
            pairs.append((gold_left, gold_left) if is_same else differences)
        else:
            alternatives.append(tuple(pairs))
    certain = [pairs for pairs in alternatives if all(g == a for g, a in pairs)]
    return tuple(certain[:1] or alternatives[:_MAX_PARTS])


def _relations(text: str) -> list[tuple[str, str, str]] | None:
    """Return (smaller side, sign, larger side) of each relation of chains and lists; None if a side is missing."""
    found: list[tuple[str, str, str]] = []
    for part in _split(text)[0]:
        depths = bracket_depths(part)
        signs = [m for m in _SIGN_OR_EQUAL.finditer(part) if depths[m.start()] == 0]
        borders = [0, *(b for s in signs for b in s.span()), len(part)]
        sides = [part[borders[i] : borders[i + 1]].strip() for i in range(0, len(borders), 2)]
        if not signs or not all(sides):
            return None
        found += [_smaller_first(*relation) for relation in zip(sides, signs, sides[1:], strict=False)]
    return found


def _smaller_first(left: str, sign: re.Match[str], right: str) -> tuple[str, str, str]:
    if sign.group() in (">", r"\ge"):
        return right, _FLIPPED[sign.group()], left
    if sign.group() in ("=", r"\neq"):
        left, right = sorted((left, right))
    return left, sign.group(), right


def _bare(text: str) -> str:
    return re.sub(r"\s", "", text)


def _assigned(text: str) -> str:
    """Return tuples of assignments as `x=1, y=2`, and lists of them as lists of tuples."""
    text = text.strip()
    for opening, closing in (("(", ")"), (r"\{", r"\}")):
        inner = text[len(opening) : -len(closing)]
        if text.startswith(opening) and text.endswith(closing):
            parts = _split(inner)[0]
            if len(parts) > 1 and all(_NAMED.fullmatch(part) for part in parts):
                text = inner
    opposite = _OPPOSITE_TUPLES.fullmatch(text)
    if opposite is not None:
        return f"({opposite[1]},{opposite[2]}), (-({opposite[1]}),-({opposite[2]}))"
    tupled = _TUPLE_NAMED.fullmatch(text)
    if tupled is not None and len(_split(tupled["values"])[0]) == len(_split(tupled["names"])[0]):
        names, values = _split(tupled["names"])[0], _split(tupled["values"])[0]
        return ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
    parts, joints = _split(text)
    if "or" in joints:
        tuples = _tuples_of_assignments(parts, joints)
        if tuples is not None:
            return tuples
    if len(parts) > 1 and any(_TUPLE_NAME.match(part) for part in parts):
        return ", ".join(_TUPLE_NAME.sub("", part) for part in parts)
    return text


def _tuples_of_assignments(parts: list[str], joints: list[str]) -> str | None:
    """Return `(1,2), (3,4)` for `x=1, y=2 or x=3, y=4`; None if the alternatives do not name the same things."""
    groups: list[dict[str, str]] = [{}]
    for part, joint in zip(parts, ["", *joints], strict=True):
        if joint == "or":
            groups.append({})
        *sides, value = [side.strip() for side in split_sides(part)]
        if not sides or not value or not all(map(_IS_NAME.fullmatch, sides)):
            return None
        groups[-1] |= dict.fromkeys(sides, value)
    names = sorted(groups[0])
    if len(names) < 2 or any(sorted(group) != names for group in groups):
        return None
    values = [",".join(group[name] for name in names) for group in groups]
    return ", ".join(f"({inner})" for inner in values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Congruence:
    """`n \\equiv 1, 3 \\pmod 4`; the left side is empty in `1 \\pmod 4`."""

    left: str
    right: str
    modulus: str


def read_congruence(text: str) -> Congruence | None:
    """Return the congruence that a text states; None if it names no modulus."""
    found = _MODULUS.fullmatch(text)
    if found is None:
        return None
    # `1 (\\text{mod } 4)` was read as a product.
    *lefts, right = _EQUIVALENT.split(found["sides"].removesuffix(r"\cdot"))
    return Congruence(left=_bare(lefts[0]) if lefts else "", right=right.strip(), modulus=_bare(found["modulus"]))


def same_congruence(gold: Congruence, answer: Congruence) -> bool:
    """Return whether two congruences have the same left side, modulus and residues: 5 is 1 modulo 4."""
    is_same_left = not gold.left or not answer.left or gold.left == answer.left
    return is_same_left and gold.modulus == answer.modulus and _residues(gold) == _residues(answer)


def _residues(congruence: Congruence) -> set[str]:
    """Return the residues of `1, 3` or `\\pm 1`, least ones if they and the modulus are integers."""
    found: set[str] = set()
    for part in listed(congruence.right):
        value = _bare(part)
        signs = ("", "-") if value.startswith(r"\pm") else ("",)
        found |= {sign + value.removeprefix(r"\pm") for sign in signs}
    is_number = _SHORT_INTEGER.fullmatch(congruence.modulus) is not None and int(congruence.modulus) != 0
    if not is_number or not all(map(_SHORT_INTEGER.fullmatch, found)):
        return found
    return {str(int(value) % int(congruence.modulus)) for value in found}


def split_values(text: str) -> tuple[str, ...]:
    """Return the values of a list, tuple or set."""
    text = text.strip()
    for opening, closing in (("(", ")"), (r"\{", r"\}")):
        if text.startswith(opening) and text.endswith(closing) and len(_split(text)[0]) == 1:
            text = text[len(opening) : -len(closing)]
            break
    return tuple(_split(text)[0])


def listed(text: str) -> list[str]:
    """Return the values of a bare list: the parts between commas, `or` and `and` outside of brackets."""
    return _split(text)[0]


def split_sides(text: str) -> list[str]:
    """Return the sides of an equation: the parts between equals signs outside of brackets."""
    depths = bracket_depths(text)
    borders = [i for i, char in enumerate(text) if char == "=" and depths[i] == 0]
    starts = [0, *(i + 1 for i in borders)]
    return [text[start:end] for start, end in zip(starts, [*borders, len(text)], strict=True)]


def _split(text: str) -> tuple[list[str], list[str]]:
    """Return the parts between top-level commas, `or` and `and`, and the separators between them."""
    parts: list[str] = []
    joints: list[str] = []
    start = 0
    for position, end, joint in _joints(text):
        parts.append(text[start:position].strip())
        joints.append(joint)
        start = end
    parts.append(text[start:].strip())
    if not all(parts):
        return [text], []
    return parts, joints


def _joints(text: str) -> list[tuple[int, int, str]]:
    """Return start, end and name of each separator outside of brackets, in order."""
    found = [(m.start(), m.end(), _joint_name(m)) for m in CONNECTIVE.finditer(text)]
    in_connectives = {i for start, end, _ in found for i in range(start, end)}
    found += [(m.start(), m.end(), ",") for m in re.finditer(",", text) if m.start() not in in_connectives]
    depths = bracket_depths(text)
    return sorted(joint for joint in found if depths[joint[0]] == 0)


def _joint_name(match: re.Match[str]) -> str:
    word = (match[1] or match[2] or match[3] or ",").lower()
    return {"lor": "or", "vee": "or", "land": "and", "wedge": "and"}.get(word, word)


def bracket_depths(text: str) -> list[int]:
    """Count the open brackets before each character. Interval brackets need not match in kind: `(0,1]`."""
    depths = [0] * (len(text) + 1)
    depth = previous = 0
    for match in _BRACKETS.finditer(text):
        # A bracket itself has the depth of what is before it.
        depths[previous : match.start() + 1] = [depth] * (match.start() + 1 - previous)
        depth = depth + 1 if match.group()[-1] in "([{" else max(0, depth - 1)
        previous = match.start() + 1
    depths[previous:] = [depth] * (len(text) + 1 - previous)
    return depths


def _signs(text: str) -> list[re.Match[str]]:
    """Return the relation signs outside of brackets."""
    depths = bracket_depths(text)
    return [m for m in _SIGN.finditer(text) if depths[m.start()] == 0]


def _read_membership(parts: list[str]) -> Statement | None:
    """Read `x \\in S` as S."""
    text = ", ".join(parts)
    signs = _signs(text)
    if len(signs) != 1 or signs[0].group() != r"\in":
        return None
    name, members = text[: signs[0].start()].strip(), text[signs[0].end() :].strip()
    if _MEMBER_NAME.fullmatch(name) is None or not members:
        return None
    return Statement(kind="plain", texts=(members,))


def _read_region(parts: list[str], joints: list[str]) -> Statement | None:
    """Read inequalities of one name as the set of numbers that they allow; None if a part is no such inequality."""
    regions = [_interval(part) for part in parts]
    known = [region for region in regions if region is not None]
    if len(known) != len(parts) or len(parts) > _MAX_PARTS:
        return None
    names = {name for name, _ in known if name}
    if len(names) > 1 or {"or", "and"} <= set(joints):
        return None
    intervals = [interval for _, interval in known]
    # a union binds less than the intersection around it
    factors = []
    for interval in intervals:
        factors.append(f"({interval})" if r"\cup" in interval else interval)
    union, intersection = r"\cup".join(intervals), r"\cap".join(factors)
    readings = [union] if "or" in joints else [intersection]
    if joints and set(joints) == {","} and not any(r"\neq" in part for part in parts):
        readings = [union, intersection]  # a comma may mean either: `x<-1, x>2` or `x>-2, x<7`
    return Statement(kind="region", texts=tuple(dict.fromkeys(readings)), names=tuple(names))


def _interval(text: str) -> tuple[str, str] | None:
    """Return the name and interval of `x>3`, `3<x`, `-2 \\le x \\le 7`, `\\ge 4` or `x \\neq 4`, else None."""
    value = _NAMED.fullmatch(text)
    if value is not None and _IS_NAME.fullmatch(value[1]) and is_bound(value[2].strip()):
        return _name(value[1]), rf"\{{{value[2].strip()}\}}"
    signs = _signs(text)
    if not 1 <= len(signs) <= 2 or any(s.group() == r"\in" for s in signs):
        return None
    borders = [0, *(b for s in signs for b in s.span()), len(text)]
    sides = [text[borders[i] : borders[i + 1]].strip() for i in range(0, len(borders), 2)]
    relations = [s.group() for s in signs]
    if len(sides) == 3:
        return _between(sides, relations)
    left, right = sides
    relation = relations[0]
    if _is_limit(left, right) and right and not _is_limit(right, left):
        left, right, relation = right, left, _FLIPPED[relation]
    absolute = _ABSOLUTE.fullmatch(left)
    if is_bound(right) and absolute is not None:
        return _around_zero(absolute[1], relation, right)
    if not _is_limit(right, left) or not (left == "" or _IS_NAME.fullmatch(left)):
        return None
    intervals = {
        "<": rf"(-\infty,{right})",
        r"\le": rf"(-\infty,{right}]",
        ">": rf"({right},\infty)",
        r"\ge": rf"[{right},\infty)",
        r"\neq": rf"(-\infty,{right})\cup({right},\infty)",
    }
    return _name(left), intervals[relation]


def _around_zero(name: str, relation: str, radius: str) -> tuple[str, str] | None:
    """Return the name and interval of an absolute value with a bound: `|x|<1` is `(-1,1)`."""
    intervals = {
        "<": f"(-{radius},{radius})",
        r"\le": f"[-{radius},{radius}]",
        ">": rf"(-\infty,-{radius})\cup({radius},\infty)",
        r"\ge": rf"(-\infty,-{radius}]\cup[{radius},\infty)",
    }
    is_plain = re.fullmatch(r"[^+\-<>]+", radius) is not None
    return (_name(name), intervals[relation]) if is_plain and relation in intervals else None


def _between(sides: list[str], relations: list[str]) -> tuple[str, str] | None:
    low, name, high = sides
    if not (_is_limit(low, name) and _is_limit(high, name) and _IS_NAME.fullmatch(name)) or r"\neq" in relations:
        return None
    if all(r in (">", r"\ge") for r in relations):
        low, high, relations = high, low, [_FLIPPED[r] for r in reversed(relations)]
    if not all(r in ("<", r"\le") for r in relations):
        return None
    opening = "(" if relations[0] == "<" else "["
    closing = ")" if relations[1] == "<" else "]"
    return _name(name), f"{opening}{low},{high}{closing}"


def is_bound(text: str) -> bool:
    """Return whether a side of an inequality is a number."""
    text = _EULER.sub("2", text)
    return text != "" and is_numeric(text) and re.search(r"\d|\\infty|\\pi", text) is not None and "=" not in text


def _is_limit(text: str, name: str) -> bool:
    """Return whether a side bounds a name: a number, or parameters around an unknown as in `0<x<a`."""
    return is_bound(text) or (name in _UNKNOWNS and _PARAMETERS.fullmatch(text) is not None)


def _read_list(parts: list[str]) -> Statement:
    """Read a list of values, or of values with names: `x=1 or x=2` is `1, 2`, and so is `x=1,2`."""
    values: list[str] = []
    names: list[str] = []
    for part in parts:
        named = _NAMED.fullmatch(part)
        if named is not None and "=" not in named[2]:
            names.append(_name(named[1]))
            values.append(named[2].strip())
        elif names or "=" not in part:
            # In `x=1,2` the name counts for both values.
            names.append(names[-1] if names else "")
            values.append(part)
        else:
            names.append("")
            values.append(part)
    bases = {re.sub(r"_.*", "", name) for name in names}
    # `x=1, y=2` gives each name its value, but `x_1=1, x_2=2` lists the values of one unknown.
    is_each_named = all(names) and len(set(names)) == len(names)
    if is_each_named and len(bases) > 1:
        return Statement(kind="named", texts=tuple(values), names=tuple(names))
    if len(bases) == 1:
        return Statement(kind="plain", texts=(", ".join(values),))
    return Statement(kind="plain", texts=(", ".join(parts),))


def _name(text: str) -> str:
    return re.sub(r"[\s{}]", "", text).lower()
