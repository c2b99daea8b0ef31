# ruff: noqa: RUF001  Unicode signs are the point
import pytest

from klear_core.data.curation.normalise import tokens_of


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Let $x$ be real.", "let x be REAL"),
        ("Find $\\frac{1}{2}+x$", "find \\( \\dfrac{1}{2} + x \\)"),
        ("$2 \\cdot 3$", "2 * 3"),
        ("$2\\times3$", "2\N{MULTIPLICATION SIGN}3"),
        ("$a\\le b$", "a ≤ b"),
        ("$a\\leq b$", "a <= b"),
        ("10{,}000 or 10,000", "10000 or 10000"),
        ("$\\left( 3, \\frac{\\pi}{2} \\right)$", "(3,\\frac{\\pi}{2})"),
        ("$x\\, =\\;2$", "x = 2"),
        ("$x^{2}$", "x^2"),
        ("$17_{b}$", "17_b"),
        ("Find $\\text{gcd}(a,b)$", "Find \\operatorname{gcd}(a, b)."),
        ("a  b\n\tc", "a b c"),
        ("$A_iA_1A_{i+1}$", "$A_i A_{1} A_{i+1}$"),
        ("trapezoid $A B C D$ with $A B=5$", "trapezoid $ABCD$ with $AB = 5$"),
        (
            "don\N{RIGHT SINGLE QUOTATION MARK}t \N{LEFT DOUBLE QUOTATION MARK}quote\N{RIGHT DOUBLE QUOTATION MARK}",
            'don\'t "quote"',
        ),
        ("\N{LATIN SMALL LIGATURE FI}nd", "find"),
        ("3 \N{MINUS SIGN} 4", "3 - 4"),
        ("the integer $k^{}_{}$ is added", "the integer $k$ is added"),
        ("$P_1^{}$ and ${}_{}P_2$", "$P_1$ and $P_2$"),
        ("$A_{}^{2}$", "$A^2$"),
        ("$n_{ }^{\\,}!$", "$n!$"),
        ("$AB=92^{}_{}$, $BC=50$", "$AB=92$, $BC=50$"),
        ("$1,2,3,\\ldots,100$", "$1,2,3,\\dots,100$"),
        ("$1+2+\\cdots+100$", "$1+2+...+100$"),
        ("$1,2,\\dotsc,9$", "$1, 2, \N{HORIZONTAL ELLIPSIS}, 9$"),
        ("$\\frac12$ or $\\frac 1{x+2}$", "$\\frac{1}{2}$ or $\\dfrac{1}{x + 2}$"),
        ("$2πr$, $90°$", "$2\\pi r$, $90^{\\circ}$"),
        ("$A ∪ B$, $⌊x⌋$, $√2$, $10²$", "$A \\cup B$, $\\lfloor x\\rfloor$, $\\sqrt{2}$, $10^2$"),
        ("$a \\geqslant b$, $6 \\div 2$", "$a ≥ b$, $6 ÷ 2$"),
        ("$f^{\\prime}(x)$", "$f'(x)$"),
        ("the students' books", "the students books"),
        ("$x=1\\hspace{1cm}\\mbox{ if }z$", "$x=1$ if $z$"),
        ("$.5$ or $-.25$", "$0.5$ or $-0.25$"),
        ("5 \N{NON-BREAKING HYPHEN} 3 \N{HYPHEN} 2 \N{FIGURE DASH} 1", "5 - 3 - 2 - 1"),
        ("x¹⁰ + aₙ₊₁ = 2ˣ⁻¹", "$x^{10} + a_{n+1} = 2^{x-1}$"),
        ("3½ cups", "3 1/2 cups"),
        ("It isn't, and they don’t.", "It is not, and they do not."),
        ("num\u00adber of pri\u200bmes", "number of primes"),
        ("‖x‖ and ⟨u, v⟩", "$\\|x\\|$ and $\\langle u, v \\rangle$"),
        ("a &lt; b &amp;&amp; c &ge; d&#39;s &#x2264; 3&nbsp;km &times; &pi;", "a < b && c ≥ d's ≤ 3 km × π"),
        ("1 &lt 2 &amp 3&#62 x", "1 < 2 & 3 > x"),
        ("1 &amp;lt; 2, &amp;amp;le; 3", "1 < 2, ≤ 3"),  # encoded two and three times
        ("&#70;&#105;&#110;&#100; x", "Find x"),
        ("<p>Find <i>x</i><sup>2</sup> if a<sub>n+1</sub> is<br/>5.</p>", "Find $x^2$ if $a_{n+1}$ is 5."),
        ('<div class="q"><b>Fi</b>nd</div><div>x</div>', "Find x"),
        ("x \\u2264 3 \\u003c \\u03c0, \\ud835\\udc65", "x ≤ 3 < π, x"),
        ("One.\\nFind\\tX.\\n\\n2 \\neq 3", "One. Find x. 2 \\neq 3"),
        ("Find%20x%20%3C%203%2C%20y", "Find x < 3, y"),
        ("Find+x%20%3C%203%2C+y", "Find x < 3, y"),
        ("xâ‰¤3, donâ€™t, Ã—", "x≤3, don’t, ×"),
        ("**Problem.** Find *all* x. ***Note:***", "Problem. Find all x. Note:"),
        ("\\fr\u200bac{1}{2}, ＼ｆｒａｃ｛１｝｛２｝", "\\frac{1}{2}, \\frac{1}{2}"),
        ("Find the аrea оf а сircle", "Find the area of a circle"),  # Cyrillic letters
    ],
)
def test_typesetting_does_not_matter(one, other):
    assert tokens_of(one) == tokens_of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("3+4", "3-4"),
        ("3*4", "3+4"),
        ("x^2", "x2"),
        ("0.5", "0 5"),
        ("1.5", "15"),
        ("(a+b)*c", "a+(b*c)"),
        ("a < b", "a > b"),
        ("12 3", "1 23"),
        ("mod 10: 3,+4=?", "mod 10: 3,-4=?"),
        ("5!", "5"),
        ("$A_{}^{2}$", "$A$"),
        ("$x^{-}$", "$x$"),
        ("$90^{\\circ}$", "$90$"),
        ("$a \\cdots b$", "$ab$"),
        ("$1\\ldots 9$", "$19$"),
        ("$2 \\cdot 3$", "$2 \\cdots 3$"),
        ("$\\overline{12}$", "$12$"),
        ("\\frac{1}{23}", "\\frac{12}{3}"),
        ("$2^{x+1}$", "$2^x+1$"),
        ("$\\frac{a}{b+c}$", "$\\frac{a}{b}+c$"),
        ("$\\sqrt{x+1}$", "$\\sqrt{x}+1$"),
        ("$A ∪ B$", "$A ∩ B$"),
        ("$f'(x)$", "$f(x)$"),
        ("$\\{x\\}$", "$x$"),
        ("10²", "102"),
        (".5", "5"),
        ("-.25", "-25"),
        ("2ⁿ", "2n"),
        ("eˣ", "ex"),
        ("aₙ₊₁", "aₙ+1"),
        ("f(\N{NON-BREAKING HYPHEN}3)", "f(3)"),
        ("7 \N{HYPHEN} 4", "7 4"),
        ("3½", "31/2"),
        ("0.3\u0305", "0.3"),
        ("x\u0304", "x"),
        ("p ⟺ q", "p ⟹ q"),
        ("‖x‖", "x"),
        ("isn't", "is"),
        ("a &lt; b", "a &gt; b"),
        ("m<n and n>k", "m and k"),
        ("f(x) \\\\n = 3", "f(x) = 3"),  # a line break of LaTeX, and n
        ("20%30%40", "2040"),
        ("2 ** 3 ** x", "2 3 x"),
        ("a**b**c", "abc"),
        ("x *y* z", "xyz"),
        ("x<sup>2</sup>", "x2"),
        ("Board:\n_ Q _ _\n_ _ _ _\n_ _ _ _", "Board:\n_ _ _ _\n_ Q _ _\n_ _ _ _"),
        ("Count:\n####\n#  #\n####", "Count:\n#####\n#   #\n#####"),
        ("Solve:\n✅❌✅\n❌❔❌\n✅❌✅", "Solve:\n✅❌✅\n❌❌❌\n❔❌✅"),
        ("Decode 😀\U000e0158\U000e0159", "Decode 😀\U000e0158\U000e015a"),
    ],
)
def test_what_changes_the_meaning_stays(one, other):
    assert tokens_of(one) != tokens_of(other)


def test_a_drawing_is_the_same_at_any_indentation_and_with_any_line_ends():
    drawing = "Count the rectangles:\n\n  ####\n  #  #\n\n  ####\n\nof this picture"
    other = drawing.replace("\n  ", "\n").replace("\n", " \r\n")
    assert tokens_of(drawing) == tokens_of(other)


def test_lines_of_formulas_code_and_tables_are_no_drawing():
    text = "\\[\nx = \\frac{1}{2}\n\\]\n$$\n1, 2;\n3, 4;\n5, 6;\n}\n}\n}\n| 0.5 | 12 |\n| 0.6 | 13 |\n| 0.7 | 14 |"
    assert tokens_of(text) == tokens_of(text.replace("\n", " "))


def test_other_scripts_have_words_too():
    assert tokens_of("Найдите x. 求解 y") == ["найдите", "x", "求", "解", "y"]
