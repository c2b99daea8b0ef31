"""Normalise questions to tokens, so that encodings, markup and typesetting hide no copy."""

# ruff: noqa: RUF001  the signs that are normalised look like others

from __future__ import annotations

import hashlib
import html
import re
import unicodedata
from dataclasses import dataclass
from itertools import groupby
from textwrap import dedent
from urllib.parse import unquote

_ENTITY = re.compile(
    r"&(?:(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[a-zA-Z][a-zA-Z0-9]{1,31});|#\d{2,7}(?!\d)|(?:amp|lt|gt|quot|nbsp)(?![a-z]))"
)
"""An entity of HTML; browsers read some without their semicolon too."""
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
_COMMENT = re.compile(r"<!--.{0,2000}?-->|<!\[CDATA\[|\]\]>", re.DOTALL)
"""Comments of a bounded length: the time for a text of their beginnings alone would grow with its square."""
_CHAT_MARK = re.compile(r"<\|/?([a-z_]{3,40})\|>|\[/?(INST)\]|<</?(SYS)>>|<((?:start|end)_of_turn)>")
"""Marks of chat templates around a prompt. Their names stay as words, and their signs are none of mathematics."""
_BYTE_ESCAPE = re.compile(r"\\x([2-7][0-9a-fA-F])|\\U000([01][0-9a-fA-F]{4})")
"""Characters as Python escapes them; no command of LaTeX begins alike."""
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
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af"
"""Chinese and Japanese characters. Nothing separates words there, so that a whole clause would be one word."""
_LETTER = rf"[^\W\d_{_UNSPACED}]"
_TOKEN = (
    rf"{_LETTER}+|[{_UNSPACED}]|\d+(?:\.\d+)?|"
    r"[-+*/=<>!^|()\[\]&%\u0304\u0305\u2190-\u22ff\u27c0-\u27ff\u2a00-\u2aff¬\ue000\ue001]|\\[{}]|[\ue100-\ue1ff]{8}|"
    + _PRIME
)
"""Numbers, runs of letters, single Chinese and Japanese characters, signs with a meaning in mathematics (also primes,
set braces, the two group marks, and the marks of drawings)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Patterns:
    lone_letters: re.Pattern[str]
    token: re.Pattern[str]


_ANY = _Patterns(lone_letters=re.compile(_LONE_LETTERS), token=re.compile(_TOKEN))
_ASCII = _Patterns(
    lone_letters=re.compile(_LONE_LETTERS.replace(r"[^\W\d_]", "[a-z]")),
    token=re.compile(_TOKEN.replace(_LETTER, "[a-z]").replace(r"[^\W\d_]", "[a-z]").replace(r"\d", "[0-9]")),
)
"""The same for ASCII text in lower case, in which they are found twice as fast."""
_GROUP_PIECE = re.compile(r"\\[a-z]+|\\.|[{}]|[^\\{}]+", re.DOTALL)
_OPEN, _CLOSE = "\ue000", "\ue001"
"""Private characters for braces with a meaning: `2^{x+1}` is not `2^x+1`."""
_LEAST_DRAWN = 3
"""Lines of a drawing, at least."""
_NOT_DRAWN = re.compile(r"[^\W_]{3}|\\[a-zA-Z()\[\]\\]|[{}$`]")
"""A word, a long number, LaTeX, code or Markdown, of which no line of a drawing has any."""
_HIDDEN = re.compile("[\U000e0100-\U000e01ef]{2,}")
"""Characters without a picture of their own, in which a text can be hidden behind an emoji."""
_FIRST_MARK = 0xE100
"""Private characters, one for each value of a byte, for the hash that stands for a drawing."""


def tokens_of(text: str) -> list[str]:
    """Return the text's tokens, lower-cased: numbers, words (each character of Chinese and Japanese), and signs that
    have a meaning in mathematics.

    White space, other punctuation, dollar signs and LaTeX commands that only affect layout are dropped. So are braces,
    except around the arguments of several tokens: `2^{x+1}` is not `2^x+1`, while `x^{2}` is `x^2`. A drawing (a board,
    a picture of characters), in which these make the difference, is one token.
    """
    if text.isascii() and text.isdigit():
        return [text]  # most answers
    plain = _ascii_letters(_without_layout(_with_marked_drawings(_decoded(text))))
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
    if "\\x" in plain or "\\U" in plain:
        plain = _BYTE_ESCAPE.sub(lambda m: chr(int(m[1] or m[2], 16)), plain)
    if "\\u" in plain:
        plain = _ESCAPED.sub(_escaped_character, plain)
    if "\\n" in plain or "\\t" in plain or "\\r" in plain:
        plain = _ESCAPED_SPACE.sub(" ", plain)
    if "[INST]" in plain or ("<" in plain and ">" in plain):
        plain = _SCRIPT_TAG.sub(lambda m: f"{'^' if m[1].lower() == 'sup' else '_'}{{{m[2]}}}", plain)
        plain = _CHAT_MARK.sub(lambda m: f" {m[m.lastindex or 0]} ", _COMMENT.sub("", plain))
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


def _with_marked_drawings(text: str) -> str:
    """Return the text with a hash in place of each drawing: of such a block of lines, and of a text behind an emoji."""
    plain = text if text.isascii() else _HIDDEN.sub(lambda m: _mark_of(m[0]), text)
    if plain.count("\n") + 1 < _LEAST_DRAWN:
        return plain
    pieces: list[str] = []
    for is_drawing, block in groupby(plain.split("\n"), key=_may_be_drawn):
        lines = [line.rstrip() for line in block]
        if is_drawing and sum(map(bool, lines)) >= _LEAST_DRAWN:
            pieces.append(_mark_of(dedent("\n".join(lines)).strip("\n")))
        else:
            pieces += lines
    return "\n".join(pieces)


def _may_be_drawn(line: str) -> bool:
    """Return whether a line is empty, or consists of signs with few letters and digits among them."""
    if _NOT_DRAWN.search(line):
        return False  # most lines
    signs = "".join(line.split())
    return 3 * sum(map(str.isalnum, signs)) <= len(signs)


def _mark_of(drawing: str) -> str:
    digest = hashlib.blake2b(drawing.encode(errors="surrogatepass"), digest_size=8).digest()
    return f" {''.join(chr(_FIRST_MARK + byte) for byte in digest)} "


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
