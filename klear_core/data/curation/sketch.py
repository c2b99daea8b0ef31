"""Normalise questions to tokens, and sketch them for the search of near-duplicates."""

# ruff: noqa: RUF001  the signs that are normalised look like others

from __future__ import annotations

import hashlib
import html
import re
import unicodedata
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt

from klear_core.config.curate import NearConfig

_ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[a-zA-Z][a-zA-Z0-9]{1,31});")
_MOST_ENCODINGS = 3
"""Times that a text is decoded: some pages encode an entity's own sign again (`&amp;lt;`)."""
_SCRIPT_TAG = re.compile(r"<(sup|sub)(?:\s[^<>]*)?>([^<>]*)</\1\s*>", re.I)
_BREAK = re.compile(r"</?(?:p|br|hr|div|li|ul|ol|tr|td|th|table|pre|h[1-6])(?:\s[^<>]*)?/?>", re.I)
_TAG = re.compile(
    r"</?(?:a|abbr|b|blockquote|body|center|cite|code|em|figure|font|html|i|img|kbd|mark|math|q|s|samp|section|small|"
    r"span|strike|strong|sub|sup|tbody|thead|tt|u|var)(?:\s[^<>]*)?/?>",
    re.I,
)
"""Tags of HTML. Those with other names are inequalities or code."""
_ESCAPED = re.compile(r"\\u([dD][89aAbB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})")
"""Characters as JSON escapes them."""
_ESCAPED_SPACE = re.compile(r"(?<!\\)\\[nrt](?!Leftarrow|Rightarrow|Leftrightarrow|VDash|Vdash)(?![a-z])")
"""A line break that was escaped twice, but not the LaTeX commands that begin alike (`\\neq`, `\\theta`)."""
_EMPHASIS = re.compile(
    r"(?<![\w)\]}*])(?:(\*{2,3})(?=[^\s*])([^*\n]+?)(?<=[^\s*])\1|\*([A-Za-z][A-Za-z' ,.:;?!-]+)\*)(?![\w(\[{*])"
)
"""Text that Markdown emphasises (`**Problem.**`); a product has a space, or a letter or digit, on both sides."""
_PERCENT = re.compile(r"%[0-9a-fA-F]{2}")
_FEW_PERCENT = 3
"""Escapes of a URL from which a text without any space is one."""
_MOJIBAKE = re.compile(r"[\u00c2-\u00f4\u0192\u02c6\u0152][\u0080-\u00bf\u0152-\u2122]{1,3}")
"""UTF-8 that was read as Windows-1252: `â‰¤` is ≤."""
_LOOK_ALIKES = str.maketrans("аеорсухікмтнвзАВЕКМНОРСТХІ", "aeopcyxikmthb3ABEKMHOPCTXI")
"""Cyrillic letters that look like Latin ones."""
_DISGUISED = str.maketrans(
    {full: full - 0xFEE0 for full in range(0xFF01, 0xFF5F)} | dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff"))
)
"""Wide forms of ASCII, and spaces of no width, which may stand inside of a LaTeX command."""
_CYRILLIC, _LATIN = re.compile("[\u0400-\u04ff]"), re.compile("[a-zA-Z]")
_SPACING = re.compile(
    r"\\(?:[,;:!> ()\[\]]"
    r"|(?:quad|qquad|displaystyle|textstyle|limits|nolimits|left|right|[bB]igg?[lrm]?|thinspace|enspace)(?![a-zA-Z]))"
    r"|\\hspace\*?\{[^{}]*\}|\\\\|~|\{,\}(?=\d)"
)
_EMPTY_SCRIPT = re.compile(r"[_^]\s*\{\s*\}")
"""Empty sub- and superscripts: AoPS writes `A_{}^{}` for spacing."""
_STYLE = re.compile(
    r"\\(?:text|textnormal|mbox|hbox|textbf|textit|texttt|textrm|emph"
    r"|mathrm|mathbf|mathit|mathsf|boldsymbol|operatorname)(?![a-zA-Z])\*?"
)
_NAMES = re.compile(
    r"\\(?:[dt]frac|[dt]binom|cdot|times|ast|div|leq|le|leqslant|geq|ge|geqslant|neq|ne|lt|gt"
    r"|lvert|rvert|vert|mid|[lc]?dots|dots[cbmi]|rightarrow)(?![a-zA-Z])"
)
_NAME_MEANS = {
    "dfrac": "\\frac ", "tfrac": "\\frac ", "dbinom": "\\binom ", "tbinom": "\\binom ",
    "cdot": "*", "times": "*", "ast": "*", "div": "/", "lt": "<", "gt": ">", "rightarrow": "\\to ",
    "leq": "<=", "le": "<=", "leqslant": "<=", "geq": ">=", "ge": ">=", "geqslant": ">=", "neq": "!=", "ne": "!=",
    "lvert": "|", "rvert": "|", "vert": "|", "mid": "|",
    "dots": " ... ", "ldots": " ... ", "cdots": " ... ",
    "dotsc": " ... ", "dotsb": " ... ", "dotsm": " ... ", "dotsi": " ... ",
}  # fmt: skip
_PRIME_NAME = re.compile(r"\^\s*(?:\{\s*\\prime\s*\}|\\prime(?![a-zA-Z]))")
_SHORT_FRACTION = re.compile(r"(\\frac)\s*(\d)\s*(\d)")
"""LaTeX takes one digit as an argument without braces: `\\frac12` is one half."""
_GREEK = "alpha beta gamma delta epsilon zeta eta theta kappa lambda mu nu xi pi rho sigma tau phi chi psi omega"
_SUPERSCRIPTS = re.compile("[¹²³\u2070-\u207f\u1d2c-\u1d61\u1d9c\u1da0\u1dbb\u02b0-\u02b8\u02e1-\u02e3]+")
_SUBSCRIPTS = re.compile("[\u2080-\u209c\u1d62-\u1d6a\u2c7c]+")
"""Unicode scripts. NFKC would make plain signs of them: 10² would read as 102, 2ⁿ as 2n, and aₙ₊₁ as aₙ+1."""
_MIXED_NUMBER = re.compile(r"(?<=\d)(?=[\u00bc-\u00be\u2150-\u215e])")
"""Place between a number and a fraction in one character: NFKC would make 31/2 of 3½."""
_CHARACTERS = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "‐": "-", "‒": "-", "―": "-",
        "×": "*", "·": "*", "⋅": "*", "∗": "*", "÷": "/", "⁄": "/", "∣": "|",
        "≤": "<=", "⩽": "<=", "≥": ">=", "⩾": ">=", "≠": "!=", "’": "'", "′": "'", "°": "^\\circ ",
        "√": "\\sqrt ", "∞": "\\infty ", "±": "\\pm ", "∑": "\\sum ", "∏": "\\prod ", "∫": "\\int ", "∂": "\\partial ",
        "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "∉": "\\notin ", "⊂": "\\subset ", "⊆": "\\subseteq ", "→": "\\to ",
        "∠": "\\angle ", "△": "\\triangle ", "⊥": "\\perp ", "∥": "\\parallel ", "≡": "\\equiv ", "≈": "\\approx ",
        "⌊": "\\lfloor ", "⌋": "\\rfloor ", "⌈": "\\lceil ", "⌉": "\\rceil ", "⊕": "\\oplus ", "∅": "\\emptyset ",
        "⟨": "\\langle ", "⟩": "\\rangle ", "‖": "|",
        "\u00ad": "",  # soft hyphen
    }
)  # fmt: skip
"""Unicode signs and the ASCII or LaTeX that means the same."""
_GREEK_LETTER = re.compile(r"(?<![α-ω])[α-ω](?![α-ω])")
"""A Greek letter that does not belong to a Greek word."""
_GREEK_NAMES = dict(zip("αβγδεζηθκλμνξπρστφχψω", _GREEK.split(), strict=True))
_LEADING_POINT = re.compile(r"\.(?<![\w.)\]}]\.)(?=\d)")
"""The point of `.5`, which is 0.5 and not 5; not that of `Fig.5` or of `...5`."""
_CONTRACTED_NOT = re.compile(r"(?<=[a-z])n't(?![a-z])")
_THOUSANDS_COMMA = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_SUBSCRIPT = re.compile(r"([_^][A-Za-z])(?=[A-Za-z])")
"""A subscript without braces is one character: `A_iA_1` is A_i A_1."""
_LONE_LETTERS = r"\s(?<=[^\W\d_]\s)(?<![^\W\d_][^\W\d_]\s)\s*(?=[^\W\d_](?![^\W\d_]))"
"""White space between single letters, which are joined: some sources write the triangle ABC as `A B C`."""
_PRIME = r"(?<=[\W_][^\W\d_])'(?![^\W\d_])|(?<=[)'])'(?![^\W\d_])"
_TOKEN = (
    r"[^\W\d_]+|\d+(?:\.\d+)?|"
    r"[-+*/=<>!^|()\[\]&%\u0304\u0305\u2190-\u22ff\u27c0-\u27ff\u2a00-\u2aff¬\ue000\ue001]|\\[{}]|" + _PRIME
)
"""Numbers, runs of letters, signs with a meaning in mathematics (also primes, set braces, and the two group marks)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Patterns:
    lone_letters: re.Pattern[str]
    token: re.Pattern[str]


_ANY = _Patterns(lone_letters=re.compile(_LONE_LETTERS), token=re.compile(_TOKEN))
_ASCII = _Patterns(
    lone_letters=re.compile(_LONE_LETTERS.replace(r"[^\W\d_]", "[a-z]")),
    token=re.compile(_TOKEN.replace(r"[^\W\d_]", "[a-z]").replace(r"\d", "[0-9]")),
)
"""The same for ASCII text in lower case, in which they are found twice as fast."""
_GROUP_PIECE = re.compile(r"\\[a-z]+|\\.|[{}]|[^\\{}]+", re.DOTALL)
_OPEN, _CLOSE = "\ue000", "\ue001"
"""Private characters for braces with a meaning: `2^{x+1}` is not `2^x+1`."""


def tokens_of(text: str) -> list[str]:
    """Return the text's tokens, lower-cased: numbers, runs of letters, and signs that have a meaning in mathematics.

    White space, other punctuation, dollar signs and LaTeX commands that only affect layout are dropped. So are braces,
    except around the arguments of several tokens: `2^{x+1}` is not `2^x+1`, while `x^{2}` is `x^2`.
    """
    if text.isascii() and text.isdigit():
        return [text]  # most answers
    plain = _ascii_letters(_without_layout(_decoded(text)))
    # A pattern is only tried on texts with the sign that it begins with: most texts are prose.
    if "," in plain:
        plain = _THOUSANDS_COMMA.sub("", plain)
    if "." in plain:
        plain = _LEADING_POINT.sub("0.", plain)
    if "n't" in plain:
        plain = _CONTRACTED_NOT.sub(" not", plain)
    if "\\frac" in plain:
        plain = _SHORT_FRACTION.sub(r"\1 \2 \3 ", plain)
    if "_" in plain or "^" in plain:
        plain = _SUBSCRIPT.sub(r"\1 ", plain)
    patterns = _ASCII if plain.isascii() else _ANY
    plain = patterns.lone_letters.sub("", plain)
    return patterns.token.findall(_mark_groups(plain, patterns.token))


def _decoded(text: str) -> str:
    """Return the text that is meant by one with HTML entities and tags, escapes of JSON or of URLs, or mojibake."""
    plain = text
    for _ in range(_MOST_ENCODINGS):
        if "&" not in plain or (unescaped := _ENTITY.sub(lambda m: html.unescape(m[0]), plain)) == plain:
            break
        plain = unescaped
    if "%" in plain and len(_PERCENT.findall(plain)) >= _FEW_PERCENT and not any(map(str.isspace, plain)):
        plain = unquote(plain.replace("+", " "))
    if "\\u" in plain:
        plain = _ESCAPED.sub(_escaped_character, plain)
    if "\\n" in plain or "\\t" in plain or "\\r" in plain:
        plain = _ESCAPED_SPACE.sub(" ", plain)
    if "<" in plain and ">" in plain:
        plain = _SCRIPT_TAG.sub(lambda m: f"{'^' if m[1].lower() == 'sup' else '_'}{{{m[2]}}}", plain)
        plain = _TAG.sub("", _BREAK.sub(" ", plain))
    if "*" in plain:
        plain = _EMPHASIS.sub(lambda m: m[2] or m[3], plain)
    if not plain.isascii():
        plain = _MOJIBAKE.sub(_repaired, plain).translate(_DISGUISED)
        if _CYRILLIC.search(plain) and len(_LATIN.findall(plain)) > len(_CYRILLIC.findall(plain)):
            plain = plain.translate(_LOOK_ALIKES)
    return plain


def _escaped_character(match: re.Match[str]) -> str:
    if match[3] is None:
        return bytes.fromhex(match[1] + match[2]).decode("utf-16-be")
    character = chr(int(match[3], 16))
    return match[0] if "\ud800" <= character <= "\udfff" else character


def _repaired(match: re.Match[str]) -> str:
    """Return the character whose bytes in UTF-8 were read as Windows-1252; the same text if it is none."""
    try:
        return match[0].encode("cp1252").decode()
    except UnicodeError:
        return match[0]


def _without_layout(text: str) -> str:
    """Return the text without LaTeX commands that only affect layout, and with one name for each meaning."""
    plain = text
    if "\\" in plain or "~" in plain or "{,}" in plain:
        plain = _SPACING.sub(_spacing_means, plain)
    if "\\" in plain:
        plain = _STYLE.sub(" ", plain)
        plain = _NAMES.sub(lambda m: _NAME_MEANS[m[0][1:]], plain)
    if "_" in plain or "^" in plain:
        plain = _EMPTY_SCRIPT.sub(" ", plain)
        plain = _PRIME_NAME.sub("'", plain)
    return plain


def _ascii_letters(text: str) -> str:
    """Return the text in lower case, with ASCII or LaTeX for each sign that has one."""
    if text.isascii():
        return text.lower()  # nothing below applies
    plain = _SUPERSCRIPTS.sub(r"^{\g<0>}", _MIXED_NUMBER.sub(" ", text))
    plain = _SUBSCRIPTS.sub(r"_{\g<0>}", plain)
    plain = unicodedata.normalize("NFKC", plain).translate(_CHARACTERS).casefold()
    return _GREEK_LETTER.sub(_greek_name, plain)


def is_word(token: str) -> bool:
    """Return whether a token is a number or a run of letters."""
    return token[0].isalnum()


def _spacing_means(match: re.Match[str]) -> str:
    """Return a space for a spacing command, but nothing for the comma inside a number (`10{,}000`)."""
    return "" if match[0] == "{,}" else " "


def _greek_name(match: re.Match[str]) -> str:
    name = _GREEK_NAMES.get(match[0])
    return f"\\{name} " if name else match[0]


def _mark_groups(text: str, token: re.Pattern[str]) -> str:
    """Replace the braces around arguments of several tokens by marks, and all other braces by spaces."""
    if "{" not in text:
        return text
    pieces: list[str] = []
    opened: list[tuple[int, bool]] = []  # place of an open brace in `pieces`, and whether it opens an argument
    takes_argument = False
    for match in _GROUP_PIECE.finditer(text):
        piece = match[0]
        if piece == "{":
            opened.append((len(pieces), takes_argument))
            pieces.append(" ")
            takes_argument = False
        elif piece == "}":
            start, is_argument = opened.pop() if opened else (0, False)
            has_meaning = is_argument and len(token.findall("".join(pieces[start:]))) > 1
            if has_meaning:
                pieces[start] = _OPEN
            pieces.append(_CLOSE if has_meaning else " ")
            takes_argument = is_argument  # a command may have further arguments
        else:
            pieces.append(piece)
            is_argument = takes_argument and len(piece.strip()) == 1  # the 1 of `\frac 1{x+2}`
            if not piece.isspace() and not is_argument:
                takes_argument = piece[0] == "\\" or piece.rstrip()[-1] in "^_]"
    return "".join(pieces)


# ---- ragged ----
# Hold lists of numbers of different lengths in flat arrays, which can be saved, mapped into memory and joined.


Numbers = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Lists of numbers, concatenated in one array."""

    values: Numbers
    ends: npt.NDArray[np.int64]
    """End of each list in `values`."""

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> Numbers:
        start = self.ends[index - 1] if index else 0
        return self.values[start : self.ends[index]]

    def where(self, is_kept: npt.NDArray[np.bool_]) -> Ragged:
        """Return the lists with only the marked ones of their numbers."""
        num_kept = np.concatenate([[0], np.cumsum(is_kept, dtype=np.int64)])
        return Ragged(self.values[is_kept], num_kept[self.ends])

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the length of each list."""
        return np.diff(self.ends, prepend=0)


def ragged(lists: Sequence[Collection[int]], dtype: npt.DTypeLike) -> Ragged:
    """Return lists of numbers as flat arrays."""
    ends = np.cumsum([len(numbers) for numbers in lists], dtype=np.int64)
    # One array for all: an array for each list costs more than its numbers.
    return Ragged(np.fromiter(chain.from_iterable(lists), dtype=dtype), ends)


def joined_parts(parts: Sequence[Numbers], dtype: npt.DTypeLike) -> Ragged:
    """Return arrays as the lists of one Ragged."""
    values = np.concatenate(parts) if parts else np.empty(0, dtype=dtype)
    return Ragged(values, np.cumsum([len(part) for part in parts], dtype=np.int64))


def joined(tables: Sequence[Ragged]) -> Ragged:
    """Return all lists of several tables, in order."""
    values = np.concatenate([table.values for table in tables])
    starts = np.cumsum([0, *(len(table.values) for table in tables[:-1])])
    return Ragged(values, np.concatenate([table.ends + start for table, start in zip(tables, starts, strict=True)]))


def distinct(values: Numbers) -> Numbers:
    """Return the distinct numbers, ascending. Several times as fast as `np.unique`, which hashes since numpy 2.3."""
    ordered = np.sort(values)
    return ordered[is_first(ordered)]


def is_first(values: Numbers) -> npt.NDArray[np.bool_]:
    """Return which numbers differ from the one before them; the first number does."""
    differs: npt.NDArray[np.bool_] = np.append(True, values[1:] != values[:-1])
    return differs[: len(values)]


# ---- sketch ----
# Sketch questions for the search of near-duplicates: MinHash bands find candidates, bottom-k sketches compare them.
#
# A sketch depends on a question's tokens alone, so shards can be sketched separately, in any order, on any machine.
# Axis letters: B bands, N questions, P permutations, R rows of a band.


Hashes = npt.NDArray[np.uint64]

SKETCH_SIZE = 256
"""Most shingles that are kept of a question. Most published questions have fewer, so their similarity is exact. For
longer ones it is an estimate with a standard error of 0.03 at most."""
_MAX_CODES = 1 << 18
"""Tokens whose hashes are remembered (about 40 MB)."""


@dataclass(frozen=True, slots=True, eq=False)
class Sketches:
    """The parts of questions that are compared with other questions."""

    shingles: Ragged
    """The smallest distinct shingle hashes of each question, ascending; all of them if there are at most
    `SKETCH_SIZE`."""
    band_keys_BN: Hashes
    """One key a band. Two questions are candidates if they have the same key in any band."""


def sketches_of(questions: Sequence[Sequence[str]], cfg: NearConfig) -> Sketches:
    """Return the sketches of questions, each with at least one token."""
    hashes = shingle_hashes(token_codes(questions), cfg.shingle)
    return Sketches(_smallest(hashes), _band_keys(hashes, cfg))


@dataclass(frozen=True, slots=True, eq=False)
class Overlaps:
    """Numbers of shingles of pairs of questions; of a sample of them if one has more than `SKETCH_SIZE`."""

    num_shared_P: npt.NDArray[np.int64]
    num_in_union_P: npt.NDArray[np.int64]
    num_in_smaller_P: npt.NDArray[np.int64]
    """Those of the question that has fewer."""

    def similarities(self) -> npt.NDArray[np.float64]:
        """Return the Jaccard similarities."""
        alike: npt.NDArray[np.float64] = self.num_shared_P / self.num_in_union_P
        return alike


def overlaps_of(one: Ragged, other: Ragged) -> Overlaps:
    """Return the overlap of each set of shingles with the one at the same place in `other`.

    If a sketch is full, its similarity is an estimate: the smallest hashes of the union are a random sample of it
    (bottom-k sketches, Cohen and Kaplan 2007).
    """
    if not len(one):
        return Overlaps(*(np.empty(0, dtype=np.int64) for _ in range(3)))
    # The pair's number is above the bits of the shingle, so that one sort merges all pairs. A shared shingle occurs
    # twice in a row.
    mine = _numbered(one)
    merged = np.sort(np.concatenate([mine, _numbered(other)]))
    is_repeat = np.append(False, merged[1:] == merged[:-1])
    is_shared = np.append(is_repeat[1:], False)[~is_repeat]
    union = merged[~is_repeat]
    pair = (union >> np.uint64(32)).astype(np.int64)
    starts = np.searchsorted(pair, np.arange(len(one)))
    # If one of the sketches is full, only the smallest `SKETCH_SIZE` hashes of the union are a random sample of it.
    is_full = np.maximum(one.lengths(), other.lengths()) == SKETCH_SIZE
    counts = (np.arange(len(union)) - starts[pair] < SKETCH_SIZE) | ~is_full[pair]
    num_in_union = np.bincount(pair[counts], minlength=len(one))
    num_shared = np.bincount(pair[counts & is_shared], minlength=len(one))
    is_mine = np.isin(union, mine, assume_unique=True)
    num_mine = np.bincount(pair[counts & is_mine], minlength=len(one))
    return Overlaps(num_shared, num_in_union, np.minimum(num_mine, num_in_union - num_mine + num_shared))


def hash_of(text: str) -> int:
    """Return a 64-bit hash that is the same in every process, unlike `hash`."""
    # surrogatepass: JSON escapes can produce lone surrogates, which plain UTF-8 refuses to encode.
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "big")


def token_codes(questions: Sequence[Sequence[str]]) -> Ragged:
    """Return a hash of each token of each question."""
    codes = _marked_codes(questions)
    return Ragged(codes.values & _CODE, codes.ends)


def token_and_word_codes(questions: Sequence[Sequence[str]]) -> tuple[Ragged, Ragged]:
    """Return a hash of each token of each question, and the same of the tokens that are words or numbers."""
    marked = _marked_codes(questions)
    codes = Ragged(marked.values & _CODE, marked.ends)
    return codes, codes.where(marked.values > _CODE)


def _marked_codes(questions: Sequence[Sequence[str]]) -> Ragged:
    ends = np.cumsum([len(tokens) for tokens in questions], dtype=np.int64)
    codes = map(_CODES.__getitem__, chain.from_iterable(questions))
    return Ragged(np.fromiter(codes, dtype=np.uint64), ends)


def shingle_hashes(codes: Ragged, length: int) -> Ragged:
    """Return the hashes of all runs of `length` token codes of each question; of all its codes if it has fewer.

    A question without a code has no run.
    """
    lengths = codes.lengths()
    run_lengths = np.minimum(length, lengths)
    num_runs = lengths - run_lengths + (lengths > 0)
    ends = np.cumsum(num_runs)
    # Place of each run's first code: where the question's codes begin, plus the run's number within the question.
    starts = np.repeat(codes.ends - lengths - (ends - num_runs), num_runs) + np.arange(ends[-1] if len(ends) else 0)
    run_length = np.repeat(run_lengths, num_runs)
    hashes = run_length.astype(np.uint64)
    for i in range(length):
        is_long = run_length > i  # short questions have one run, which is shorter
        if is_long.all():
            hashes = _mixed(hashes ^ codes.values[starts + i])
        else:
            hashes[is_long] = _mixed(hashes[is_long] ^ codes.values[starts[is_long] + i])
    return Ragged(hashes, ends)


def full_runs(codes: Ragged, length: int) -> Ragged:
    """Return the hashes of each list's runs of `length` codes; a shorter list has none."""
    lengths = codes.lengths()
    is_long = lengths >= length
    long = codes if is_long.all() else codes.where(np.repeat(is_long, lengths))
    return shingle_hashes(long, length)


def _smallest(hashes: Ragged) -> Ragged:
    """Return the `SKETCH_SIZE` smallest distinct upper halves of the hashes of each question."""
    lengths = hashes.lengths()
    numbers = np.repeat(np.arange(len(hashes), dtype=np.uint64), lengths)
    # The question's number is above the bits of the hash, so that one sort orders by question, then by hash.
    packed = distinct((numbers << np.uint64(32)) | (hashes.values >> np.uint64(32)))
    question = (packed >> np.uint64(32)).astype(np.int64)
    starts = np.searchsorted(question, np.arange(len(hashes)))
    is_kept = np.arange(len(packed)) - starts[question] < SKETCH_SIZE
    counts = np.bincount(question[is_kept], minlength=len(hashes))
    return Ragged((packed[is_kept] & np.uint64(0xFFFFFFFF)).astype(np.uint32), np.cumsum(counts))


def _band_keys(hashes: Ragged, cfg: NearConfig) -> Hashes:
    """Return a key for each band and question: a hash over the MinHash values of the band's rows."""
    starts = hashes.ends - hashes.lengths()
    seeds_P = _mixed(np.arange(1, cfg.num_bands * cfg.rows_per_band + 1, dtype=np.uint64))
    seeds_BR = seeds_P.reshape(cfg.num_bands, cfg.rows_per_band)
    keys_BN = np.empty((cfg.num_bands, len(hashes)), dtype=np.uint64)
    permuted, shifted = np.empty_like(hashes.values), np.empty_like(hashes.values)
    for band, seeds_R in enumerate(seeds_BR):
        keys_N = np.full(len(hashes), band, dtype=np.uint64)
        for seed in seeds_R:
            # One permutation at a time, over the shingles of all questions, so that the arrays stay in the cache.
            np.bitwise_xor(hashes.values, seed, out=permuted)
            _mix(permuted, shifted)
            minima_N = np.minimum.reduceat(permuted, starts)
            keys_N = _mixed(keys_N ^ minima_N)
        keys_BN[band] = keys_N
    return keys_BN


def _numbered(sets: Ragged) -> Hashes:
    """Return all values of the sets, with the number of the set in the upper 32 bits."""
    numbers = np.repeat(np.arange(len(sets), dtype=np.uint64), sets.lengths())
    return (numbers << np.uint64(32)) | sets.values.astype(np.uint64)


_CODE = np.uint64(0xFFFFFFFF)
"""The bits of a token's hash; the next one marks words and numbers."""


class _Codes(dict[str, int]):
    """Hashes of the tokens seen so far, up to a limit, with the mark of words and numbers."""

    def __missing__(self, token: str) -> int:
        # surrogatepass: JSON escapes can produce lone surrogates, which plain UTF-8 refuses to encode.
        code = zlib.crc32(token.encode(errors="surrogatepass")) | (is_word(token) << 32)
        if len(self) < _MAX_CODES:
            self[token] = code
        return code


_CODES = _Codes()


def _mixed(values: Hashes) -> Hashes:
    """Return a bijective hash of each value."""
    mixed = values.copy()
    _mix(mixed, np.empty_like(mixed))
    return mixed


def _mix(values: Hashes, shifted: Hashes) -> None:
    """Hash each value in place, with an array of the same size to work in: this is the inner loop of sketching.

    The hash is the finaliser of SplitMix64, a bijection; sums and products wrap around.
    """
    values += np.uint64(0x9E3779B97F4A7C15)
    np.right_shift(values, np.uint64(30), out=shifted)
    values ^= shifted
    values *= np.uint64(0xBF58476D1CE4E5B9)
    np.right_shift(values, np.uint64(27), out=shifted)
    values ^= shifted
    values *= np.uint64(0x94D049BB133111EB)
    np.right_shift(values, np.uint64(31), out=shifted)
    values ^= shifted
