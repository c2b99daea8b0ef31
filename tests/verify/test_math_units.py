# ruff: noqa: RUF001
"""Units, number words and words that are neither."""

import pytest
from verify_builders import is_right

from klear_core.verify import JudgePool

RIGHT = [
    ("5 cm^2", "5 cm²"),
    (r"5 \text{ cm}^2", "5 cm^2"),
    (r"5\text{ cm}^2", "5"),
    ("5", r"5\text{ square centimeters}"),
    (r"15\mbox{ cm}^2", "15"),
    (r"864 \mbox{ inches}^2", r"864 \text{ square inches}"),
    ("5", r"5\ \mathrm{m/s}"),
    (r"5 \text{ m/s}", r"5\, m\,s^{-1}"),
    (r"5 \text{ m/s}", r"5\ \mathrm{m}\cdot\mathrm{s}^{-1}"),
    (r"5\text{ km/h}", r"5 \text{ kilometers per hour}"),
    (r"5\text{ km/h}", "5 kph"),
    ("60", r"60 \text{ mph}"),
    ("60 mph", r"60 \text{ miles per hour}"),
    ("60 mph", "60 miles an hour"),
    ("25", r"25 \text{ sq ft}"),
    (r"135\text{ square feet}", r"135 \text{ ft}^2"),
    (r"135\text{ square feet}", "135 sq. ft."),
    (r"5225 \text{ cubic inches}", r"5225 \text{ in}^3"),
    ("60 per hour", "60"),
    (r"9.8 \text{ m/s}^2", r"9.8\ \mathrm{m\,s^{-2}}"),
    (r"9.8 \text{ m/s}^2", r"9.8 \text{ meters per second squared}"),
    ("30", r"30^\circ"),
    (r"30^\circ", "30 degrees"),
    (r"20^\circ C", r"20^{\circ}\text{C}"),
    (r"20^\circ C", r"20 \text{ degrees Celsius}"),
    ("20°C", "20"),
    ("18 dollars", r"\$18"),
    ("18", r"18\text{ USD}"),
    ("5.4 cents", r"5.4 \text{ cents}"),
    (r"\$0.50", "50 cents"),
    ("50 cm", "0.5 m"),
    ("36 km/h", r"10 \text{ m/s}"),
    ("90 minutes", r"1.5 \text{ hours}"),
    ("2 ft", "24 inches"),
    ("8", r"8 \text{ students}"),
    ("12", r"12 \text{ ways}"),
    (r"240\text{ ways.}", "240"),
    (r"7 \text{ distinct integers}", "7"),
    (r"320000 \mbox{ acres}", "320000"),
    (r"5\text{ apples}", "5"),
    ("5", "5 apples"),
    (r"20 \text{ sq units}", r"20\text{ square units}"),
    (r"34\text{ sq. units}", "34"),
    (r"99\pi \text{ square inches}", r"99\pi"),
    (r"480 + 480\sqrt{3}\text{ feet}", r"480(1+\sqrt{3})"),
    (r"\frac{270}7\text{ degrees}", r"\frac{270}{7}"),
    (r"3200 \mathrm{~cm}^{3}", "3200"),
    (r"36 \mathrm{~mL}", "36"),
    ("1.3", r"1.3 \text{ eV}"),
    ("300", r"300 \text{ km/s}"),
    ("1000", r"1000 \text{ rad/s}"),
    ("1.325e-27", r"1.325 × 10⁻²⁷ \mathrm{~kg·m/s}"),
    ("700 nm", "700"),
    ("0.003", r"0.003 \text{ arcseconds}"),
    ("3.83e35", r"3.83 \times 10^{35} \text{ ergs/s}"),
    (r"2 \text{ euros}", "2"),
    (r"12 \text{ gm}", "12 grams"),
    (r"25 \text{ years old}", "25"),
    (r"40\text{ points}", "40"),
    (r"\text{5 cm}", "5"),
    ("5", r"5\,\text{kg}"),
    (r"10^0 \text{ minutes}", "1"),
    (r"0.25\,\text{ cm}", "0.25"),
    ("1/2 inch", r"\frac12"),
    (r"7\text{ hours}.", "7"),
    (r"9\text{ a.m.}", "9 am"),
    ("3", r"x = 3 \text{ cm}"),
    ("12", r"12^{\text{th}} \text{ grade}"),
    ("20 m/s", r"20\frac{\text{m}}{\text{s}}"),
    ("1 L", "1000 mL"),
    ("4", r"\text{Answer: } 4"),
    ("12", r"\text{Area} = 12"),
    ("8.24", r"\approx 8.24 \text{ mph}"),
    ("2/3", r"\$\dfrac23 \approx \$0.67"),
    ("73", "73 percent"),
    ("0.73", r"73\text{ percent}"),
    ("5", "5 $"),
    (r"\pi", r"\pi \text{ cm}"),
    ("4", r"4\text{ pairs}"),
    ("10", r"10 \text{ different ways}"),
    ("3", r"3\text{ people}"),
    ("11/15 days", r"\frac{11}{15}"),
]  # fmt: skip

WRONG = [
    ("4", r"4 \text{ or more}"),
    ("4", "4 or more"),
    ("4", r"4 \text{ or less}"),
    ("4", r"\text{not } 4"),
    ("4", r"\text{at least } 4"),
    ("4", "at least 4"),
    ("4", r"\text{more than } 4"),
    ("4", r"4 \text{ at least}"),
    ("4", r"\text{about } 4 \text{ or } 5"),
    ("4", r"4 \text{ or } 5"),
    ("4", r"4 \text{ not}"),
    ("4", r"\text{no more than } 4"),
    ("4", r"4 \text{ to } 6"),
    ("4", r"4 \text{ remainder } 2"),
    ("4", r"4 \text{ at most}"),
    ("4", r"4\text{ million}"),
    ("4", r"\text{between } 4 \text{ and } 6"),
    ("4", r"4 \text{ is wrong}"),
    ("4", r"4 \text{ dollars or more}"),
    ("4", r"4\mathrm{~or~more}"),
    ("4", r"4\text{ or fewer}"),
    ("4", r"4\text{ zorbs}"),
    ("4", r"4 \text{, I guess}"),
    ("4", r"\text{less than } 4"),
    ("4", r"\text{up to }4"),
    ("4", "not 4"),
    ("4", "under 4"),
    ("4", r"4 \text{ more}"),
    ("4", r"\text{exactly not } 4"),
    ("5 cm²", "5 cm³"),
    ("5 m", "5 m²"),
    ("5 km/h", "5 m/s"),
    ("5 cm", "5 m"),
    (r"5\text{ mph}", r"5 \text{ km/h}"),
    ("5 apples", "5 oranges"),
    ("5 apples", "5 cm"),
    ("5 square feet", "5 cubic feet"),
    ("5 square feet", "5 feet"),
    ("5 hours", "5 minutes"),
    ("5 dollars", "5 cents"),
    (r"5 \text{ m/s}", r"5 \text{ m/s}^2"),
    (r"5 \text{ m/s}", r"5 \text{ s/m}"),
    (r"20^\circ C", r"20^\circ F"),
    ("5 kg", "5 g"),
    ("5 kg", "5 lb"),
    ("5 per hour", "5 per minute"),
    ("5 cm", "5 mm"),
    ("30 degrees", "30 radians"),
    ("5 in", "5 ft"),
    ("5 L", "5 mL"),
    ("5 eV", "5 J"),
    (r"\$5", "€5"),
    ("5 cm", "50 m"),
    ("90 minutes", "2 hours"),
    ("9 a.m.", "9 p.m."),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "answer"), RIGHT)
def test_values_that_mean_the_same_are_right_both_ways(math_pool: JudgePool, gold: str, answer: str) -> None:
    assert is_right(math_pool, gold, answer)
    assert is_right(math_pool, answer, gold)


@pytest.mark.parametrize(("gold", "answer"), WRONG)
def test_values_that_mean_something_else_are_wrong_both_ways(math_pool: JudgePool, gold: str, answer: str) -> None:
    assert not is_right(math_pool, gold, answer)
    assert not is_right(math_pool, answer, gold)


def test_a_letter_written_against_a_reference_is_a_variable(math_pool: JudgePool) -> None:
    assert not is_right(math_pool, "2m", "2")
    assert is_right(math_pool, "2m", "m+m")
    assert is_right(math_pool, "2", "2m")
    assert not is_right(math_pool, "2", "3m")


def test_clock_times_with_and_without_their_half_of_the_day(math_pool: JudgePool) -> None:
    assert is_right(math_pool, r"9\text{ a.m.}", "9:00")
    assert is_right(math_pool, r"4\!:\!51\!:\!06 \text{ p.m.}", "4:51:06")
    assert not is_right(math_pool, r"4\!:\!51\!:\!06 \text{ p.m.}", "4:51:07 p.m.")
    assert not is_right(math_pool, r"9\text{ a.m.}", r"9\text{ p.m.}")
