# ruff: noqa: RUF001
"""Right math answers in the spellings of many writers are accepted, and look-alikes of them are not."""

import re
from collections import Counter
from pathlib import Path

import pytest
from math_probes import Probe, boxed_probe, probes
from metamorphic import SHARED, published_references, rewritten
from verify_builders import math_problem

from klear_core.types import Verdict
from klear_core.verify import JudgePool

PAGE = Path(__file__).parents[2] / "docs" / "data" / "verdicts.md"
KINDS = list(dict.fromkeys(probe.kind for probe in probes()))
SEED, NUM_REFERENCES = 20, 120


RIGHT_LATER = [
    ('7-2i', '7-2\\imath'),
    ('42', '\\text{The answer is }42'),
    ('17', '\\text{Answer}: 17'),
    ('7', '\\text{There are }7\\text{ ways}'),
    ('2025', 'the year 2025'),
    ('42', '\\highlight{42}'),
    ('17', '\\mathcolor{red}{17}'),
    ('42', '\\begin{array}{c}42\\end{array}'),
    ('42', '\\text{(}42\\text{)}'),
    ('\\text{red}', '\\text{rojo}'),
    ('\\text{January}', '\\text{enero}'),
    ('\\frac{\\pi}{4}+n\\pi', '\\frac{\\pi}{4}+k\\pi'),
    ('\\ln|x|+C', '\\ln|x|+C_1'),
    ('y=e^x+C_1', 'y=e^x+C'),
    ('n = 3k+1', 'n=3m+1'),
    ('y=Ce^{2x}', 'y=Ke^{2x}'),
    ('f(x) = cx', 'f(x)=kx'),
    ('\\{4k+3 : k\\ge 0\\}', '\\{4n+3 : n \\ge 0\\}'),
    ('(0,5)', 'P(0,5)'),
    ('A(1,2)', '(1,2)'),
    ('£5', '5 pounds'),
    ('20', '20\\,\\Omega'),
    ('5\\text{ ohms}', '5\\,\\Omega'),
    ('100', '100\\text{°C}'),
    ('8', "8 o'clock"),
    ('2', '\\text{Two.}'),
    ('37.5^\\circ', "37^\\circ 30'"),
    ("3-4i", "\\overline{3+4i}"),
    ("\\bar z", "\\overline{z}"),
    ("\\bar z", "\\bar{z}"),
    ("\\bar z", "\\overline z"),
    ("42", "\\mathopen{}42\\mathclose{}"),
    ("4", "четири"),
    ("4", "cztery"),
    ("4", "\\text{dört}"),
    ("4", "四つ"),
    ("yes", "tak"),
    ("yes", "evet"),
    ("\\emptyset", "no such x exists"),
    ("\\emptyset", "nincs megoldás"),
    ("1, 2", "1 y 2"),
    ("1, 2", "1 et 2"),
    ("1, 2", "1 o 2"),
    ("1, 2", "1 ou 2"),
    ("1, 2", "1 e 2"),
    ("1, 2", "1 lub 2"),
    ("true", "Yes"),
    ("fourth", "4th"),
    ("fourth", "4^{\\text{th}}"),
    ("fourth", "4"),
    ("3rd quadrant", "third quadrant"),
    ("3rd quadrant", "Quadrant III"),
    ("3rd quadrant", "quadrant 3"),
    ("3rd quadrant", "III"),
    ("f(x)=\\frac{x}{x+1}", "y=\\frac{x}{x+1}"),
    ("\\frac{2}{3}", "2 out of 3"),
    ("\\frac{2}{3}", "2\\text{ out of }3"),
    ("17", "17 is the answer"),
    ("€7.20", "720 cents"),
    ("7.20\\text{ euros}", "720\\text{ cents}"),
    ("2 hours 30 minutes", "2:30"),
    ("7.20", "7,20 €"),
    ("1234.50", "1.234,50\\text{ euros}"),
    ("7,20 €", "7.2"),
    ("2:15", "2 hours 15 minutes"),
    ("2:15", "2h15m"),
    ("1:02:03", "1 h 2 min 3 s"),
    ("3\\mathbf{i}+4\\mathbf{j}", "(3,4)"),
    ("3\\mathbf{i}+4\\mathbf{j}", "\\begin{pmatrix}3\\\\4\\end{pmatrix}"),
    ("2i-3j+k", "\\langle 2,-3,1\\rangle"),
    ("(2,0,-\\frac{1}{2})", "2\\hat{i} - \\frac{1}{2}\\hat{k} + 0\\hat{j}"),
    ("3\\hat{i}+4\\hat{j}", "3\\vec{i}+4\\vec{j}"),
    ("3\\hat{\\imath}+4\\hat{\\jmath}", "4\\mathbf{j}+3\\mathbf{i}"),
    ("x=\\frac{\\pi}{3}+2k\\pi, k\\in\\mathbb{Z}", "\\{x\\mid x=\\frac{\\pi}{3}+2\\pi k, k\\in \\mathbf{Z}\\}"),
    ("(1,-2,3)", "\\begin{pmatrix}1\\\\-2\\\\3\\end{pmatrix}"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "(1,2)"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "(1,2)^T"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\langle1,2\\rangle"),
    ("\\frac{5}{2} \\text{ m/s}^2", "2.5\\, \\frac{\\text{m}}{\\text{s}^2}"),
    ("\\$1,250.50", "US$1250.50"),
    ("€7.20", "7 euros and 20 cents"),
    ("€7.20", "7 euros y 20 céntimos"),
    ("2 hours 15 minutes", "two hours and fifteen minutes"),
    ("3:45 PM", "15:45"),
    ("3:45 PM", "3{:}45\\text{ pm}"),
    ("3:45 PM", "3:45 \\text{ in the afternoon}"),
    ("ABCD", "A, B, C, D"),
    ("\\binom{10}{3}", "C(10,3)"),
    ("\\binom{10}{3}", "{}_{10}C_3"),
    ("\\binom{10}{3}", "C_{10}^3"),
    ("(3,4)", "(3,4)^{T}"),
    ("(3,4)", "(3,4)^\\top"),
    ("35", "\\mathrm{C}_7^3"),
    ("fifth grade", "5th grade"),
    ("£4.50", "4 pounds and 50 pence"),
    ("5 feet 3 inches", "5'3\\\""),
    ("5", "\\$5 a day"),
    ("5 dollars per hour", "5"),
    ("5 dollars per hour", "\\$5"),
    ("f(x)=ax+b", "f(x)=ax+b, \\text{ where } a, b \\text{ are constants}"),
    ("90^\\circ", "90°"),
    ("\\text{odd}", "\\text{нечётная}"),
    ("f(x)=ax \\text{ for any constant } a", "f(x)=cx \\text{ for any constant } c"),
    ("f(x)=ax, a\\in\\mathbb{R}", "f(x)=cx \\text{ for any constant } c"),
    ("f(x)=ax, \\text{ where } a \\text{ is a constant}", "f(x)=cx, c \\text{ constant}"),
    ("f(x)=cx", "f(x)=kx \\text{ for some constant } k"),
    ("f(x)=ax, a\\in\\mathbb{R}", "f(x)=cx, \\text{ where } c \\text{ is a real constant}"),
    ("f(x)=cx \\text{ for } c\\in\\mathbb{R}", "f(x)=kx, \\text{ where } k \\text{ is a constant}"),
    ("f(x)=kx", "f(x)=cx \\text{ for some constant } c"),
    ("f(x)=kx \\text{ for all real constants } k", "f(x)=cx"),
    ("(0, \\frac{1}{e})", "0<a<\\frac1e"),
    ("(e,\\infty)", "x>e"),
    ("(0,e)", "0<x<e"),
    ("(0,e^2]", "0<x\\le e^2"),
    ("e>1", "1<e"),
    ("0<e<1", "0<e<1"),
    ("(1,\\infty)", "e>1"),
    ("(0,0),(1,1)", "x=y=0 \\text{ or } x=y=1"),
    ("(0,0,0),(1,1,1)", "x=y=z=0 \\text{ or } x=y=z=1"),
    ("5", "\\$5 \\text{ per hour}"),
    ("5", "\\$5/\\text{hour}"),
    ("5", "\\$5/hr"),
    ("\\$5\\text{ per hour}", "5 dollars per hour"),
    ("\\$5\\text{ per hour}", "5"),
    ("\\$0.25", "\\$0.25 \\text{ per mile}"),
    ("\\$3", "\\$3 \\text{ per pound}"),
    ("12", "\\$12 \\text{ per ticket}"),
    ("3", "€3/\\text{kg}"),
    ("12 \\text{ noon}", "12:00 \\text{ PM}"),
    ("12 \\text{ noon}", "\\text{noon}"),
    ("12:00 \\text{ PM}", "12 \\text{ noon}"),
    ("\\text{noon}", "12:00 p.m."),
    ("\\max(a,b)", "\\max\\{a,b\\}"),
    ("\\max(a,b)", "\\max(b,a)"),
    ("\\min(x,1)", "\\min\\{1,x\\}"),
    ("\\gcd(a,b)", "\\gcd\\{b,a\\}"),
    ("\\max\\{a,b,c\\}", "\\max(c,b,a)"),
    ("\\min\\left(x,1\\right)", "\\min\\left\\{1,x\\right\\}"),
    ("(5,\\pi)", "r=5, \\theta=\\pi"),
    ("(5,\\pi)", "\\theta=\\pi, r=5"),
    ("ax+b, a,b\\in\\mathbb{R}", "cx+d, c,d\\in\\mathbb{R}"),
    ("f(x)=ax+b \\text{ for all constants } a, b", "f(x)=ax+b"),
    ("5", "\\$5 \\text{ a day}"),
    ("5", "\\$5 \\text{ each}"),
    ("(s+t, s-t), s,t\\in\\mathbb{R}", "(u+v,u-v), \\text{ where } u, v \\in \\mathbb{R}"),
    ("f(x)=ax+b, a,b\\in\\mathbb{R}", "f(x)=cx+d \\text{ for some constants } c \\text{ and } d"),
    ("3,4", "3 \\text{ and } 4"),
    ("(1,a,b), a,b\\in\\mathbb{R}", "(1,s,t), s,t \\in \\mathbb{R}"),
    ("3-2i", "3 - 2j"),
    ("3-2i", "(3-2j)"),
    ("x+2", "\\mathrm{x+2}"),
    ("7", "\\mathrm{7}"),
    ("\\text{parallelogram}", "\\text{平行四边形}"),
    ("\\text{equilateral}", "\\text{等边三角形}"),
    ("\\text{isosceles}", "\\text{gleichschenklig}"),
    ("\\text{infinitely many}", "\\text{无穷多个}"),
    ("\\text{infinitely many}", "\\text{infinidad}"),
    ("\\text{infinitely many}", "\\text{infinitas soluciones}"),
    ("\\text{infinitely many solutions}", "\\text{une infinité de solutions}"),
    ("\\text{increasing}", "\\text{递增}"),
    ("\\text{prime}", "\\text{质数}"),
    ("\\text{prime number}", "\\text{质数}"),
    ("\\text{none}", "\\text{no such } n"),
    ("\\text{none}", "\\text{no such n exists}"),
    ("\\text{none}", "\\text{None exist}"),
    ("\\text{Alice}", "\\text{Alice wins}"),
    ("\\text{Alice}", "\\text{Alice has a winning strategy}"),
    ("\\text{the second player}", "\\text{The second player wins}"),
    ("\\text{Bob wins}", "\\text{Bob}"),
    ("(0,a)", "0<x<a"),
    ("(a,\\infty)", "x>a"),
    ("x>a", "(a,\\infty)"),
    ("x>a", "a<x"),
    ("a<b<c", "c>b>a"),
    ("y>x", "x<y"),
    ("\\left(\\frac{a}{2},b\\right]", "\\frac{a}{2}<x\\le b"),
    ("x<2k", "2k>x"),
    ("x \\le \\sqrt{a}", "(-\\infty,\\sqrt{a}]"),
    ("0<x<a", "a>x>0"),
    ("0<x<a", "x\\in(0,a)"),
    ("x>0", "(0,\\infty)"),
    ("x+y>3", "3<y+x"),
    ("x<y<z", "z>y>x"),
    ("5", "5\\text{ hours a day}"),
    ("5", "5 hours per day"),
    ("5 hours per day", "300 minutes per day"),
    ("5\\text{ hours per day}", "5"),
    ("3", "3\\text{ mg/kg}"),
    ("25", "25\\%"),
    ("25\\%", "25"),
    ("y=C_1e^x+C_2e^{-x}", "y=Ae^x+Be^{-x}"),
    ("y=C_1\\cos x+C_2\\sin x", "y = A\\cos x + B\\sin x"),
    ("y=c_1e^{x}+c_2e^{2x}", "y=C_1e^x+C_2e^{2x}"),
    ("y=c_1e^{x}+c_2e^{2x}", "y(x)=C_1e^x+C_2e^{2x}"),
    ("y=(C_1+C_2x)e^{x}", "y=(A+Bx)e^x"),
    ("y=C_1x+C_2", "y=C_2+C_1x"),
    ("y=Ae^x+Be^{-x}", "y=C_1e^x+C_2e^{-x}"),
    ("C_1e^{t}+C_2e^{-t}", "x(t) = C_2 e^{-t}+C_1 e^t"),
    ("\\frac{e^{-2t}}{15}+C_{1}e^{t}+C_{2}e^{-t}", "x(t) = C_1 e^t + C_2 e^{-t} + \\frac{1}{15}e^{-2t}"),
    ("\\varphi", "φ"),
    ("\\phi", "φ"),
    ("\\varepsilon", "\\epsilon"),
    ("\\frac{\\pi}{2}", "π/2"),
    ("\\text{no solution}", "\\text{方程无解}"),
    ("\\text{does not exist}", "\\text{undefined}"),
    ("\\text{undefined}", "\\text{does not exist}"),
    ("\\text{undefined}", "DNE"),
    ("\\text{not defined}", "\\text{undefined}"),
    ("25000", "25 \\text{ mil}"),
    ("1000", "mil"),
    ("1000", "tausend"),
    ("5000000", "5 \\text{ millones}"),
    ("250000", "25万"),
    ("25000", "25 тысяч"),
    ("3000", "3千"),
    ("\\sqrt[3]{5}", "³√5"),
    ("\\frac{3}{4}", "³⁄₄"),
    ("\\frac{3}{4}", "³/₄"),
    ("101", "\\text{Answer = } 101"),
    ("\\text{does not converge}", "\\text{diverges}"),
    ("\\text{diverges}", "\\text{The series does not converge}"),
    ("\\text{divergent}", "diverges"),
    ("\\text{not possible}", "\\text{It's impossible}"),
    ("f(x)=ax^2", "f(x)=cx^2 \\text{ for some constant } c"),
    ("[3,5]\\cup\\{7\\}", "3\\le x\\le5\\text{ or }x=7"),
    ("3\\le x\\le5\\text{ or }x=7", "[3,5]\\cup\\{7\\}"),
    ("x=0 \\text{ or } x>2", "\\{0\\}\\cup(2,\\infty)"),
    ("(2,2),(-2,-2)", "\\pm(2,2)"),
    ("\\pm(1,-3)", "(1,-3), (-1,3)"),
    ("\\text{possible}", "\\text{not impossible}"),
    ("x=2 \\text{ or } x=3", "2,3"),
]  # fmt: skip
WRONG_LATER = [
    ('30^\\circ', "30'"),
    ('8%', '8 m'),
    ('n=3k+1', 'n=3k+2'),
    ('n=3k+1', 'm=3k+1'),
    ('f(x)=kx', 'f(x)=x'),
    ('3k+1', '3m+1'),
    ('y=Ce^{x}', 'y=Ce^{-x}'),
    ('n=3k', 'k=3n'),
    ('f(x)=2x', 'f(t)=2x'),
    ('V=kx', 'V=cy'),
    ('£8', '\\$8'),
    ('8 pounds', '£9'),
    ('8 kg', '8 pounds'),
    ('20\\,\\Omega', '20 V'),
    ('7', '\\text{There are }8\\text{ ways}'),
    ('7', '\\text{There are at least }7'),
    ('\\text{May}', '\\text{März}'),
    ('\\text{red}', '\\text{azul}'),
    ('(0,5)', 'P(5,0)'),
    ('x+1', 'y+1'),
    ('ab', 'cd'),
    ("i", "I_1"),
    ("I_2", "I_1"),
    ("2+3i", "\\overline{2+3i}"),
    ("\\bar z", "z"),
    ("second", "\\frac12"),
    ("fourth", "5th"),
    ("second quadrant", "Quadrant IV"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "(2,1)"),
    ("\\begin{pmatrix}1&2&3\\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\\\3\\end{pmatrix}"),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "(1,2,3,4)"),
    ("35", "C_7^2"),
    ("(3,4)", "C(4,3)"),
    ("9 a.m.", "21:00"),
    ("12:00 PM", "midnight"),
    ("20", "二百"),
    ("120", "一百零二"),
    ("-2, 5", "2 y 5"),
    ("6", "1 y 6"),
    ("f(x)=2x+1", "x=2y+1"),
    ("\\{x\\mid -1<x<2\\}", "\\{-1,2\\}"),
    ("ACD", "A, B, C, D"),
    ("BAC", "A, B, C"),
    ("£4.50", "4 pounds and 5 pence"),
    ("no", "no solution"),
    ("1 hour 40 minutes", "two hours and forty minutes"),
    ("\\frac{2}{3}", "3 out of 2"),
    ("2", "2 out of 3"),
    ("17", "17 is not the answer"),
    ("€7.20", "72 cents"),
    ("£7.20", "720 cents"),
    ("2 hours 30 minutes", "3:20"),
    ("7.20", "72,0 €"),
    ("7.20", "7,200 €"),
    ("(7,20)", "7,20 €"),
    ("2:15", "15 hours 2 minutes"),
    ("2:15", "2 hours"),
    ("2:15 PM", "2 hours 15 minutes"),
    ("3\\mathbf{i}+4\\mathbf{j}", "(4,3)"),
    ("2i-3j+k", "\\langle 2,3,1\\rangle"),
    ("3i+4j", "3i-4j"),
    ("3i+4j", "(3,4,1)"),
    ("3+4i", "(3,4)"),
    ("(5,\\pi)", "r=\\pi, \\theta=5"),
    ("(0,0),(1,1)", "x=y=0 \\text{ or } x=y=2"),
    ("5", "\\$6 \\text{ per hour}"),
    ("\\$5\\text{ per hour}", "\\$5\\text{ per minute}"),
    ("(0,e)", "0<x<1"),
    ("(0,e)", "0<e<x"),
    ("\\max(a,b)", "\\min\\{a,b\\}"),
    ("\\text{even}", "\\text{нечётная}"),
    ("f(x)=ax, a\\in\\mathbb{Z}", "f(x)=cx, c\\in\\mathbb{R}"),
    ("12\\text{ noon}", "12:00\\text{ AM}"),
    ("ax+b, a,b\\in\\mathbb{R}", "cxc, c,d\\in\\mathbb{R}"),
    ("\\$5\\text{ a day}", "\\$5\\text{ an hour}"),
    ("\\$5\\text{ per mile}", "\\$5\\text{ per day}"),
    ("5 dollars per hour", "\\$5 \\text{ per day}"),
    ("3-2i", "3+2j"),
    ("3", "3j"),
    ("90^\\circ", "90\\%"),
    ("\\text{Alice}", "\\text{Alice loses}"),
    ("\\text{Alice}", "\\text{Bob wins}"),
    ("(0,a)", "0<x<b"),
    ("(a,b)", "a<x"),
    ("(0,a)", "0\\le x<a"),
    ("x>a", "x<a"),
    ("x>a", "(-\\infty,a)"),
    ("5 hours per day", "5 minutes per day"),
    ("\\text{prime}", "\\text{合数}"),
    ("\\text{isosceles}", "\\text{等边三角形}"),
    ("(a,c)", "a<x<b"),
    ("x>y", "(x,\\infty)"),
    ("8\\text{ m}", "8\\%"),
    ("25", "25 mil"),
    ("25", "25 \\text{ mil}"),
    ("25", "25万"),
    ("y=C_1e^x+C_2e^{-x}", "y=Ae^x+Be^{x}"),
    ("y=C_1e^x+C_2e^{-x}", "y=Ae^x+Ae^{-x}"),
    ("y=C_1x+C_2", "y=Ax+A"),
    ("\\text{undefined}", "0"),
    ("3", "3千"),
    ("\\varphi", "\\psi"),
    ("(C_1,C_2)", "(A,B)"),
    ("3", "³"),
    ("3\\sqrt{5}", "³√5"),
    ("\\text{diverges}", "\\text{does not diverge}"),
    ("\\text{impossible}", "\\text{not impossible}"),
    ("[3,5]\\cup\\{7\\}", "3\\le x\\le5\\text{ or }x=6"),
    ("\\pm(1,-3)", "(1,-3)"),
    ("\\pm(1,-3)", "(1,-3),(1,3)"),
    ("f(x)=ax^2", "f(x)=cx^3 \\text{ for some constant } c"),
    ("7", "x=7 \\text{ or } x>9"),
]  # fmt: skip
"""Spellings of a later batch that were misjudged at first, and wrong answers beside them."""


def judged(pool: JudgePool, asked: list[Probe]) -> list[Verdict]:
    futures = [pool.submit(math_problem(probe.gold), "</think>" + probe.response) for probe in asked]
    return [future.result() for future in futures]


def misjudged(pool: JudgePool, asked: list[Probe]) -> list[tuple[str, str, str]]:
    verdicts = judged(pool, asked)
    return [
        (probe.gold, probe.response, verdict.detail)
        for probe, verdict in zip(asked, verdicts, strict=True)
        if (verdict.score == 1.0) is not probe.is_right
    ]


@pytest.fixture(scope="module")
def errors(math_pool: JudgePool) -> list[tuple[Probe, str]]:
    """All probes that are judged wrongly, with the reason of the verdict; judged once for all tests."""
    found = zip(probes(), judged(math_pool, probes()), strict=True)
    return [(probe, verdict.detail) for probe, verdict in found if (verdict.score == 1.0) is not probe.is_right]


@pytest.mark.parametrize("kind", KINDS)
def test_right_answers_of_a_class_are_accepted_and_wrong_ones_are_not(
    errors: list[tuple[Probe, str]], kind: str
) -> None:
    assert [error for error in errors if error[0].kind == kind] == []


def test_spellings_of_a_later_batch_are_judged_rightly(math_pool: JudgePool) -> None:
    asked = [boxed_probe("later", *pair, is_right=True) for pair in RIGHT_LATER]
    asked += [boxed_probe("later", *pair, is_right=False) for pair in WRONG_LATER]
    assert misjudged(math_pool, asked) == []


def test_every_reference_is_right_against_itself(math_pool: JudgePool) -> None:
    golds = list(dict.fromkeys(probe.gold for probe in probes()))
    assert misjudged(math_pool, [boxed_probe("itself", gold, gold, is_right=True) for gold in golds]) == []


def test_the_page_has_the_number_of_probes_of_each_class() -> None:
    right = Counter(probe.kind for probe in probes() if probe.is_right)
    wrong = Counter(probe.kind for probe in probes() if not probe.is_right)
    rows = re.findall(
        r"^\| ([a-z -]+?) \| (\d+) of (\d+) \| [^|]*\| (?:(\d+) of (\d+)|-) \|", PAGE.read_text("utf-8"), re.M
    )
    on_page = {kind: tuple(int(n or 0) for n in numbers) for kind, *numbers in rows}
    assert on_page == {kind: (right[kind], right[kind], 0, wrong[kind]) for kind in KINDS}


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no published references in {SHARED}")
def test_other_forms_of_published_references_are_right_and_other_values_wrong(math_pool: JudgePool) -> None:
    """Expanded, factored, reordered, on a common denominator, or typeset in another way: the value is the same."""
    asked = [
        boxed_probe(kind, gold, answer, is_right=is_right)
        for kind, gold, answer, is_right in rewritten(published_references(), SEED, NUM_REFERENCES)
    ]
    assert len(asked) > 3 * NUM_REFERENCES
    assert misjudged(math_pool, asked) == []
