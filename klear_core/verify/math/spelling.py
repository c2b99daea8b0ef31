"""Rewrite the spellings of a math answer to one, by tables: characters, commands, wrappers of the whole value, layout.

Each row says what is removed or replaced; none changes the value that a reader sees. What a reader does not see
(`\\phantom{2}`, white text, struck-out text) goes with its content. String operations only.
"""

# ruff: noqa: RUF001  the signs that are read look like others

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterable, Sequence

Rewrite = tuple[Sequence[str], re.Pattern[str], str]
"""Texts, a pattern each of whose matches holds one of them, and what takes its place."""


def rewritten(text: str, table: Iterable[Rewrite]) -> str:
    """Return the text with all rows of a table applied in turn.

    A row whose texts do not occur is skipped: looking for them takes a fiftieth of the time of its pattern.
    """
    for needs, pattern, replacement in table:
        for need in needs:
            if need in text:
                text = pattern.sub(replacement, text)
                break
    return text


# Characters --------------------------------------------------------------------------------------------------------

_INVISIBLE = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0") | {chr(i) for i in range(0xFE00, 0xFE10)}
_REVERSING = frozenset("\u202d\u202e")
"""Marks that show other text than is written: they stay, so that the answer does not match."""
_BEFORE_NFKC: dict[str, str] = {
    # Narrow and no-break spaces join digits, and NFKC would make them plain spaces.
    **dict.fromkeys("\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f", r"\,"),
    **dict.fromkeys("\u2028\u2029", " "),
    **{"\u2062": " ", "\u2063": ",", "\u2064": "+"},  # invisible times, separator and plus
    **{sign: rf"\mathbb{{{name}}}" for sign, name in zip("ℝℤℕℂℚ", "RZNCQ", strict=True)},
    **dict.fromkeys("\u00ba\u02da", "\u00b0"),  # NFKC would make letters of what stands for a degree sign
    "…": r"\ldots ",
    "″": "''",
}
_AFTER_NFKC: dict[str, str] = {
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe58\ufe63\u2796", "-"),
    **dict.fromkeys("\u2044\u2215\u00f7\u2797", "/"),
    **dict.fromkeys("\u00d7\u2715\u2716\u2a2f", r"\times "),
    **dict.fromkeys("\u00b7\u2219\u2022\u22c5\u2027\u30fb", r"\cdot "),
    **dict.fromkeys("\u2264\u2a7d\u2266", r"\le "),
    **dict.fromkeys("\u2265\u2a7e\u2267", r"\ge "),
    **dict.fromkeys("∅Ø⌀", r"\emptyset "),
    **dict.fromkeys("→⇒⟹⟶", r"\to "),
    **{"\u222a": r"\cup ", "⋃": r"\cup ", "∩": r"\cap ", "⋂": r"\cap ", "∖": r"\setminus ", "∈": r"\in "},
    **{"⟨": r"\langle ", "〈": r"\langle ", "⟩": r"\rangle ", "〉": r"\rangle ", "【": "[", "】": "]"},
    **{"⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil "},
    **{"≠": r"\neq ", "≈": r"\approx ", "±": r"\pm ", "∓": r"\mp ", "\u2228": r"\lor ", "∧": r"\land "},
    **{"∞": r"\infty ", "\u00b0": r"^\circ ", "↦": r"\mapsto ", "∀": r"\forall ", "∉": r"\notin "},
    **{"\u2211": r"\sum ", "\u220f": r"\prod ", "∫": r"\int ", "\u2217": "*", "\u2223": "|", "\u2236": ":"},
    **dict.fromkeys("“”„«»", '"'),
    **{"\u2032": "'", "\u2019": "'", "\u2018": "'", "、": ",", "٫": ".", "٬": ","},
}
_GREEK = (
    "α alpha β beta γ gamma δ delta ε epsilon ζ zeta η eta θ theta ι iota κ kappa λ lambda ν nu ξ xi π pi ρ rho "
    "σ sigma τ tau φ phi χ chi ψ psi ω omega Γ Gamma Δ Delta Θ Theta Λ Lambda Ξ Xi Π Pi Σ Sigma Φ Phi Ψ Psi"
)
_AFTER_NFKC |= {letter: rf"\{name} " for letter, name in zip(_GREEK.split()[::2], _GREEK.split()[1::2], strict=True)}
_TWINS = dict(
    zip(
        "\u0410\u0412\u0415\u041a\u041c\u041d\u041e\u0420\u0421\u0422\u0423\u0425\u0406"
        "\u0430\u0435\u043e\u0440\u0441\u0443\u0445\u0456"
        "\u0391\u0392\u0395\u0396\u0397\u0399\u039a\u039c\u039d\u039f\u03a1\u03a4\u03a5\u03a7\u03bf",
        "ABEKMHOPCTYXIaeopcyxiABEZHIKMNOPTYXo",
        strict=True,
    )
)
"""Cyrillic and Greek letters that look like Latin ones."""
_FOREIGN_RUN = re.compile(r"[\u0370-\u03ff\u0400-\u04ff]+")
_RAISED = re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱᵃᵇᶜᵈᵉᵏᵐᵒᵖᵗˣʸ]+")
_LOWERED = re.compile(r"[₀₁₂₃₄₅₆₇₈₉₊₋₍₎ₐₑₒₓₖₙₘₜᵢⱼ]+")
_PARTS = re.compile(r"[¼½¾⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]|[⁰¹²³⁴-⁹]{1,9}[\u2044\u2215/][₀-₉]{1,9}")
_ENTITY = re.compile(r"&(?:#\d{1,6}|#x[0-9a-fA-F]{1,5}|[a-zA-Z]{2,12});")
_ROOT = re.compile(r"([√∛∜])\s*(?:\{([^{}]*)\}|\(([^()]*)\)|(\d+(?:\.\d+)?|\\?[a-zA-Z]+))")
_ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}


def plain_characters(text: str) -> str:
    """Return the text without invisible characters, and with one character for those that look or mean the same."""
    text = _ENTITY.sub(lambda m: html.unescape(m[0]), text).strip("\x00 \t\r\n")
    if text.isascii():
        return text  # no table has a character of ASCII
    text = "".join(_BEFORE_NFKC.get(char, char) for char in text if not _is_invisible(char))
    text = _PARTS.sub(_fraction, text.replace("³√", "∛").replace("⁴√", "∜"))
    text = _RAISED.sub(_raised, text)
    text = _LOWERED.sub(lambda m: f"_{{{unicodedata.normalize('NFKC', m[0])}}}", text)
    text = _FOREIGN_RUN.sub(_latin_twins, unicodedata.normalize("NFKC", text))
    text = "".join(_AFTER_NFKC.get(char) or _digit(char) for char in text).replace("\u2212", "-")
    return _ROOT.sub(lambda m: f"{_ROOTS[m[1]]}{{{m[2] or m[3] or m[4]}}}", text)


def _raised(match: re.Match[str]) -> str:
    digits = unicodedata.normalize("NFKC", match[0]).replace("\u2212", "-")
    is_raised = match.start() > 0 or match.end() == len(match.string)  # the sign of `⁻3` is not
    return f"^{{{digits}}}" if is_raised else digits


def _fraction(match: re.Match[str]) -> str:
    numerator, denominator = re.split("[\u2044\u2215/]", unicodedata.normalize("NFKC", match[0]))
    return rf" \frac{{{numerator}}}{{{denominator}}}"  # the blank makes `3½` 3 and 1/2


def _is_invisible(char: str) -> bool:
    if char in _BEFORE_NFKC or char in _REVERSING:
        return False
    return char in _INVISIBLE or unicodedata.category(char) == "Cf"


def _digit(char: str) -> str:
    """Return the character, or the digit that it is in another script."""
    return str(unicodedata.decimal(char)) if char.isdecimal() else char


def _latin_twins(match: re.Match[str]) -> str:
    """Replace look-alikes alone or in capitals, such as the name of a point; words of other languages stay."""
    run = match[0]
    is_name = len(run) == 1 or (run.isupper() and len(run) <= 3)
    if not is_name or not all(c in _TWINS for c in run):
        return run
    return "".join(_TWINS[c] for c in run)


# Commands ----------------------------------------------------------------------------------------------------------

_END = r"(?![a-zA-Z])"
_GROUP = r"\s*\{(?:[^{}]|\{[^{}]*\})*\}"
_HIDDEN = r"h?phantom|vphantom|label|tag\*?|[hv]space\*?|[bx]?cancel|sout|st|invisible|hide"
_WHITE = r"(?i:white|#?f{6})"
_TEXT_FONTS = r"textbf|textit|texttt|textsf|textsc|textup|textsl|textmd|textnormal|textrm|emph|mbox|hbox"
_FONTS = r"boldsymbol|bm|pmb|bold|mathbf|mathit|mathsf|mathtt|mathnormal|underline|uline|ensuremath|smash"
_SIZES = r"tiny|scriptsize|footnotesize|small|normalsize|large|Large|LARGE|huge|Huge"
_SWITCHES = (
    rf"left|right|middle|[bB]igg?[lrm]?|(?:display|text|script)style|{_SIZES}|bf|rm|it|tt|sf|bfseries|itshape|boldmath"
    r"|limits|nolimits|nonumber|strut|mathstrut|hfill|noindent|centering"
)
_FUNCTIONS = r"ln|log|exp|sin|cos|tan|cot|csc|arcsin|arccos|arctan|sinh|cosh|tanh|gcd|lcm|det"
_TAGS = r"b|strong|i|em|u|p|br|code|span|div|answer|math|font|center|mark|big|small"
_MONEY_SIGN = r"\\text\s*\{\s*\\?\$\s*\}|\\mathrm\s*\{\s*\\?\$\s*\}|\\textdollar|\b(?:US|CA|AU|HK|NZ|C|A)\s*\\?\$"

_OHM = r"(?:\\(?:text|mathrm)\s*\{\s*)?([kM]?)\s*\}?\s*\\Omega\s*\}?"

COMMANDS: tuple[Rewrite, ...] = tuple(
    (needs.split(), re.compile(pattern), replacement)
    for needs, pattern, replacement in (
        # What a reader does not see.
        ("color", rf"\\(?:text|math)?color\s*\{{\s*{_WHITE}\s*\}}(?:{_GROUP}|[^{{}}]*)", " "),
        ("~~ <", r"~~[^~]+~~|<(?:s|del|strike)>.*?</(?:s|del|strike)>|<!--.*?-->", " "),
        (r"phantom label tag space cancel sout \st invisible hide", rf"\\(?:{_HIDDEN}){_GROUP}", " "),
        # Colours: what is coloured stays.
        ("color", r"\\(?:text|math)?color\s*(?:\[[a-zA-Z]+\])?\s*\{[^{}]*\}", " "),
        ("colorbox", r"\\fcolorbox\s*\{[^{}]*\}\s*\{[^{}]*\}|\\colorbox\s*\{[^{}]*\}", r"\\fbox"),
        (
            "bbox class style cssId enclose",
            r"\\bbox\s*(?:\[[^\[\]]*\])?(?=\s*\{)|\\(?:class|style|cssId|enclose)\s*\{[^{}]*\}(?=\s*\{)",
            r"\\fbox",
        ),
        # Fonts; sets of numbers have one name each.
        ("mathbb mathds Bbb", r"\\(?:mathbb|mathds|Bbb)\s*\{?\s*([A-Z])(?![a-zA-Z])\s*\}?", r"\\mathbb{\1}"),
        (
            r"mathbf boldsymbol \bm",
            r"(\\in\s*)\\(?:mathbf|boldsymbol|bm)\s*\{?\s*([RZNQC])(?![a-zA-Z])\s*\}?",
            r"\1\\mathbb{\2}",
        ),
        (r"\rm", r"\{\s*\\rm\s+([^{}]*)\}|\\rm\s*\{([^{}]*)\}", r"\\mathrm{\1\2}"),
        (r"\text emph mbox hbox", rf"\\(?:{_TEXT_FONTS})(?=\s*\{{)", r"\\text"),
        (r"\b \pmb \math \u \ensuremath \smash", rf"\\(?:{_FONTS}){_END}(?!\s*\{{)", " "),
        # The imaginary unit and Euler's number.
        (r"\mathrm \text", r"\\(?:mathrm|text)(?:\{([ie])\}|\s+([ie])(?![a-zA-Z]))", r" \1\2 "),
        (r"\operatorname \mathrm \text", rf"\\(?:operatorname\*?|mathrm|text)\s*\{{\s*({_FUNCTIONS})\s*\}}", r"\\\1 "),
        (r"\var", r"\\var(phi|epsilon|theta|rho|sigma|kappa|pi)" + _END, r"\\\1 "),
        (r"\imath \jmath", r"\\([ij])math(?![a-zA-Z])", r" \1 "),
        (r"\vec \overrightarrow", r"\\(?:vec|overrightarrow)\s*\{?\s*([a-zA-Z])(?![a-zA-Z])\s*\}?", r" \1 "),
        ("cis", r"\\(?:operatorname|mathrm|text)\s*\{\s*cis\s*\}", r"\\cis "),
        (r"\text", r"\\text\s*\{\s*(-?\d+(?:\.\d+)?)\s*\}", r"\1"),
        (r"\text", r"\\text\s*\{\s*([()\[\],;:.])\s*\}", r"\1"),
        # not `\ldots`, which the parser drops: `1,2,\ldots` is not `1,2`
        ("... dots", r"\.{3,}|\\[lcd]?dots[bcimo]?" + _END, r"\\dots "),
        # Money
        (r"$ \textdollar", rf"(?:{_MONEY_SIGN})", r"\\$"),
        (r"\pounds \textsterling", r"\\(?:pounds|textsterling)" + _END, "£"),
        ("euro", r"\\(?:text)?euro" + _END, "€"),
        ("yen", r"\\(?:text)?yen" + _END, "¥"),
        # Degrees
        ("^", r"\^\s*\{?\s*(?:\\(?:text|mathrm)\s*\{\s*o\s*\}|o(?![a-zA-Z]))\s*\}?", r"^\\circ "),
        (r"\deg", r"\\deg(?:ree)?" + _END, r"^\\circ "),
        (r"\circ", r"\\(?:text|mathrm)\s*\{\s*\^\{?\s*\\circ\s*\}?\s*([CF]?)\s*\}", r"^\\circ \1"),
        ("' prime", r"^(-?\d+)\s*(?:'|\^\{?\\prime\}?)\s*$", r"\1\\text{ arcminutes}"),
        # Other units
        (r"\Omega", rf"(?<=\d)(?:\\[,;:! ]|\s|~)*{_OHM}\s*$", r"\\text{ \1Ω}"),
        ("o'clock", r"\s*(?:\\text\s*\{\s*o'clock\s*\}|o'clock)", ""),
        # Brackets
        (r"\left \right", r"\\left\s*\\\{\s*(?=\\begin)|\\right\s*\.", " "),
        (r"\left", r"\\left\s*\]", "("),
        (r"\right", r"\\right\s*\[", ")"),
        (r"\lbrace", r"\\lbrace" + _END, r"\\{"),
        (r"\rbrace", r"\\rbrace" + _END, r"\\}"),
        ("ert", r"\\l[vV]ert" + _END + r"|\\r[vV]ert" + _END + r"|\\vert" + _END, "|"),
        ("\\", rf"\\(?:{_SWITCHES}){_END}", ""),
        (r"\math", r"\\math(?:open|close|ord|bin|rel|op|punct|inner)(?![a-zA-Z])\s*(?:\{\s*\})?", " "),
        ("{:}", r"\{:\}", ":"),
        (r"\langle", r"\\langle\s*([^\\]*,.*?)\\rangle", r"(\1)"),
        # Lines of a matrix
        ("\\\\", r"\\\\\s*\[\s*-?[\d.]+\s*(?:pt|em|ex|mm|cm)\s*\]", r"\\\\"),
        # Other ways to write an operation
        (r"\dfrac \tfrac \cfrac", r"\\[dtc]frac" + _END, r"\\frac"),
        (r"\over", r"\{([^{}]*)\\over" + _END + r"([^{}]*)\}", r"\\frac{\1}{\2}"),
        (r"\over", r"^([^{}=,]*)\\over" + _END + r"([^{}=,]*)$", r"\\frac{\1}{\2}"),
        (r"\choose", r"\{([^{}]*)\\choose" + _END + r"([^{}]*)\}", r"\\binom{\1}{\2}"),
        ("**", r"(?<=[\w)}])\s*\*\*\s*(\d+|[a-zA-Z])(?![\w*]*\*\*)", r"^{\1}"),
        (r"\max \min \gcd \lcm", r"\\(max|min|gcd|lcm)\s*\\\{([^{}]*)\\\}", r"\\\1(\2)"),
        (r"\colon \ratio", r"\\(?:colon|ratio)" + _END, ":"),
        (r"\log_", r"\\log_\{?\s*e" + _END + r"\s*\}?", r"\\ln "),
        (r"\not", r"\\not\s*<", r"\\ge "),
        (r"\not", r"\\not\s*>", r"\\le "),
        # HTML
        ("<sup>", r"<sup>([^<>]*)</sup>", r"^{\1}"),
        ("<sub>", r"<sub>([^<>]*)</sub>", r"_{\1}"),
        ("<", rf"</?(?:{_TAGS})(?:\s[^<>]*)?/?>", " "),
        # Words around a value
        ("out of", r"^(\d+)\s*(?:\\text\s*\{)?\s*out of\s*\}?\s*(\d+)$", r"\\frac{\1}{\2}"),
        ("answer", r"(?<=[\d})])\s*(?:\\text\s*\{)?\s*is (?:the|our|my) (?:final |correct )?answer\s*\}?\.?\s*$", ""),
        # A wide gap between named values is a comma.
        ("quad", r"(?<=[\w)}])\s*(?:\\,|~)*\s*\\q?quad\s*(?=\\?[a-zA-Z]\w*\s*=)", ", "),
    )
)  # fmt: skip
"""Commands in the order in which they are replaced. The first column has the texts of which each match holds one."""

# Wrappers of the whole value -----------------------------------------------------------------------------------------

_NAMED_FRAMES = r"hl|highlight|answer|ans|finalanswer|final|result|solution"
_FRAMED = re.compile(rf"\\(?:{_FONTS}|{_NAMED_FRAMES}|fbox|boxed|framebox)\s*(?=\{{)")
_PAIRS = (
    *(("**", "**"), ("__", "__"), ("`", "`"), ("*", "*"), ("_", "_")),
    *(('"', '"'), ("'", "'"), ("$$", "$$"), ("$", "$")),
    *((r"\(", r"\)"), (r"\[", r"\]"), (r"\text{$", "$}"), (r"\text{**", "**}")),
)
"""Marks before and after a value: markdown, quotes, and delimiters of math."""
_LEADING = re.compile(
    r"^(?:\\(?:therefore|because|implies|Rightarrow|Longrightarrow|rightarrow|longrightarrow|to|quad|qquad)(?![a-zA-Z])"
    r"|\\[,;:! ]|=>|=(?!=)|:|&|\\\\"
    r"|\\text\s*\{\s*(?i:there (?:are|is)(?: exactly)?|we (?:get|have|obtain)|(?:so|thus|hence|therefore),?"
    r"|(?:the )?(?:final |correct )?(?:answer|result|value|total|solution)(?: is| equals)?)\s*[:=]?\s*\}"
    r"\s*:?\s*(?=[-\d\\(])"
    r"|(?i:there (?:are|is)(?: exactly)?|the year)\s+(?=\d)"
    r"|(?:\*\*)?(?:the )?(?:final |correct )?(?i:answer|ans)(?: is)?\s*:\s*(?:\*\*)?(?=.))\s*"
)
_TRAILING = re.compile(
    r"(?:\\(?:blacksquare|square|Box|qed|checkmark|quad|qquad|newline)(?![a-zA-Z])|(?<!\\)\\[,;:! ]|\\\\"
    r"|[.,;:。、\s✓✔✅■□∎&]|(?<=[.\w)}])\\$)+$"
)
_MATH_AS_TEXT = re.compile(
    r"^\\(?:text|mathrm)\s*\{(?:\s*(?:final )?answer\s*:?)?((?=[^{}]*[\d=<>^+])(?![^{}]*[A-Za-z]{3})[^{}]*)\}$", re.I
)
_BRACES = re.compile(r"\\[{}\\]|[{}]")
_MAX_PASSES = 8
"""Wrappers inside one another that are taken off; more are not an answer that anybody writes."""


def plain_commands(text: str) -> str:
    """Return the text without fonts, colours, sizes and other presentation, and without wrappers of the whole value."""
    text = rewritten(text, COMMANDS)
    for _ in range(_MAX_PASSES):
        before = text
        text = _unframed(_without_marks(text))
        if text == before:
            break
    return text


def _without_marks(text: str) -> str:
    text = _TRAILING.sub("", _LEADING.sub("", text.strip())).strip()
    for opening, closing in _PAIRS:
        inner = text[len(opening) : len(text) - len(closing)]
        is_wrapped = text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing)
        if is_wrapped and opening not in inner and not inner.endswith("\\"):
            return inner.strip()
    written = _MATH_AS_TEXT.match(text)
    if written is not None:
        return written[1].strip()
    if text.startswith("{") and closing_brace(text, 0) == len(text) - 1:
        return text[1:-1].strip()
    return text


def _unframed(text: str) -> str:
    """Replace the outermost fonts and frames by their content; two boxes side by side are two values, not one."""
    parts: list[str] = []
    position = 0
    num_boxes = len(re.findall(r"\\(?:boxed|fbox)", text))
    while (match := _FRAMED.search(text, position)) is not None:
        end = closing_brace(text, match.end())
        if end is None or (num_boxes > 1 and "box" in match[0]):
            break
        # `\mathbf1` and `\frac{\textbf{1}}2` need what separated them.
        parts += [text[position : match.start()], _separated(text[match.end() + 1 : end], text[: match.start()])]
        position = end + 1
    return "".join(parts) + text[position:]


def _separated(content: str, before: str) -> str:
    return f" {content}" if re.search(r"\\[a-zA-Z]+$", before) else content


def closing_brace(text: str, opening: int) -> int | None:
    """Return the position of the brace that closes the one at `opening`; None if there is none."""
    depth = 0
    for match in _BRACES.finditer(text, opening):
        if match.group() == "{":
            depth += 1
        elif match.group() == "}":
            depth -= 1
            if depth == 0:
                return match.start()
    return None


# Layout ------------------------------------------------------------------------------------------------------------

_LINES = re.compile(
    r"\\begin\s*\{(aligned|align\*?|alignedat|gathered|gather\*?|equation\*?|split|cases|array)\}(\s*\{[^{}]*\})?"
    r"(.*?)\\end\s*\{\1\}",
    re.S,
)
_OPEN_INTERVAL = re.compile(r"(?P<left>[\[\](])(?P<bounds>[^\[\](){},]*,[^\[\](){},]*)(?P<right>[\[\])])")
_RELATION = re.compile(r"=|<|>|\\(?:le|ge|leq|geq|neq|in|approx)(?![a-zA-Z])")

_RELATION_LAST = re.compile(rf"(?:{_RELATION.pattern})\s*$")


def on_one_line(text: str) -> str:
    """Return lines of equations as a list with commas, and `]0,1[` as `(0,1)`; matrices and cases stay."""
    text = _LINES.sub(_joined_lines, text)
    if text.startswith("]") or text.endswith("["):
        text = _OPEN_INTERVAL.sub(_round_brackets, text)
    return text


def _joined_lines(match: re.Match[str]) -> str:
    rows = [row.strip() for row in re.split(r"\\\\", match[3]) if row.strip()]
    rows = [re.sub(r"\s*&\s*", " ", row).strip() if row.count("&") <= 1 else row for row in rows]
    is_array = match[1] in ("array", "cases")
    if any("&" in row for row in rows):
        return match[0]
    if len(rows) == 1 and r"\text" not in rows[0]:
        return rows[0]
    if is_array and not all(_RELATION.search(row) for row in rows):
        return match[0]
    if is_array and any(re.search(r"\\text|\bif\b", row) for row in rows):
        return match[0]  # cases with their conditions
    joined = ""
    for row in rows:
        is_continued = not joined or _RELATION.match(row) or _RELATION_LAST.search(joined)
        joined += (" " if is_continued else ", ") + row.rstrip(" ,;.")
    return joined.strip()


def _round_brackets(match: re.Match[str]) -> str:
    left = "(" if match["left"] in "](" else "["
    right = ")" if match["right"] in "[)" else "]"
    return f"{left}{match['bounds']}{right}"
