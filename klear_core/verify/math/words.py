"""Read words: those of other languages, articles, synonyms, dates and phrases that mean a symbol.

A word of another language that is also one of English (`pair`, `non`, `dos`) is translated only if it is the complete
answer. Number words and units go on to the rules for numbers and units.
"""

# ruff: noqa: RUF001  letters of other languages look like others

from __future__ import annotations

import re
from fractions import Fraction

_ANYWHERE = {
    "and": "und и и 和 与 及 y_también そして と 그리고",
    "or": "oder или 或者 或 または 또는 أو",
    "even": "偶数 偶 gerade чётное четное чётный четный чётная четная парное pari_numero 짝수",
    "odd": "奇数 奇 ungerade нечётное нечетное нечётный нечётная нечетная impar impair impaire dispari 홀수",
    "yes": "да 是 是的 はい 네 예 نعم",
    "no": "нет 否 不是 nein いいえ 아니요 لا",
    "true": "wahr vrai verdadero verdadeiro vero 真 正确 верно истина 참",
    "false": "falsch faux falso 假 错误 неверно ложь 거짓",
    "circle": "kreis cercle círculo circulo circunferencia cerchio 圆 окружность круг 円 원",
    "ellipse": "elipse ellisse эллипс 椭圆 楕円 타원",
    "parabola": "parabel parabole parábola парабола 抛物线 放物線",
    "hyperbola": "hyperbel hyperbole hipérbola hipérbole iperbole гипербола 双曲线",
    "triangle": "dreieck triángulo triângulo triangolo треугольник 三角形",
    "square": "quadrat carré cuadrado quadrado quadrato квадрат 正方形",
    "rectangle": "rechteck rectángulo retângulo rettangolo прямоугольник 长方形 矩形",
    "parallelogram": "parallelogramm parallélogramme paralelogramo parallelogramma параллелограмм 平行四边形",
    "rhombus": "raute losange rombo losango ромб 菱形",
    "trapezoid": "trapèze trapecio trapézio трапеция 梯形",
    "isosceles": "gleichschenklig isocèle isósceles isoscele равнобедренный 等腰",
    "equilateral": "gleichseitig équilatéral equilátero equilatero равносторонний 等边",
    "isosceles triangle": "等腰三角形",
    "equilateral triangle": "等边三角形",
    "right triangle": "直角三角形",
    "prime": "primzahl primo простое 质数 素数",
    "composite": "zusammengesetzt compuesto composto составное 合数",
    "increasing": "wachsend steigend croissante croissant creciente crescente возрастает возрастающая 递增 增函数",
    "decreasing": "fallend décroissante décroissant decreciente decrescente убывает убывающая 递减 减函数",
    "positive": "positiv positif positivo положительное 正数",
    "negative": "negativ négatif negativo отрицательное 负数",
    "rational": "rationnel racional razionale рациональное 有理数",
    "irrational": "irrationnel irracional irrazionale иррациональное 无理数",
    "parallel": "parallèle parallèles paralelas paralelo paralelos parallele параллельны 平行",
    "perpendicular": "senkrecht perpendiculaire perpendiculaires perpendiculares perpendicolari перпендикулярны 垂直",
    "cube": "würfel cubo куб 立方体 正方体",
    "sphere": "kugel sphère esfera sfera сфера 球体",
    "line": "gerade_linie droite línea linha retta прямая 直线",
    "Monday": "montag lundi lunes lunedì понедельник 星期一 周一 月曜日 월요일 segunda-feira",
    "Tuesday": "dienstag mardi martes martedì вторник 星期二 周二 火曜日 화요일 terça-feira",
    "Wednesday": "mittwoch mercredi miércoles miercoles mercoledì среда 星期三 周三 水曜日 수요일 quarta-feira",
    "Thursday": "donnerstag jeudi jueves giovedì четверг 星期四 周四 木曜日 목요일 quinta-feira",
    "Friday": "freitag vendredi viernes venerdì пятница 星期五 周五 金曜日 금요일 sexta-feira",
    "Saturday": "samstag sonnabend samedi sábado sabado sabato суббота 星期六 周六 土曜日 토요일",
    "Sunday": "sonntag dimanche domingo domenica воскресенье 星期日 星期天 周日 日曜日 일요일",
    "January": "januar janvier enero janeiro gennaio январь января 一月",
    "February": "februar février febrero fevereiro febbraio февраль февраля 二月",
    "March": "märz marzo março март марта 三月",
    "April": "avril abril aprile апрель апреля 四月",
    "May": "maggio май мая 五月",
    "June": "juni juin junio junho giugno июнь июня 六月",
    "July": "juli juillet julio julho luglio июль июля 七月",
    "August": "août agosto август августа 八月",
    "September": "septembre septiembre setembro settembre сентябрь сентября 九月",
    "October": "oktober octobre octubre outubro ottobre октябрь октября 十月",
    "November": "novembre noviembre novembro ноябрь ноября 十一月",
    "December": "dezember décembre diciembre dezembro dicembre декабрь декабря 十二月",
    "red": "rouge rojo vermelho красный 红 红色 紅色 赤",
    "blue": "blau bleu azul синий 蓝 蓝色 青",
    "green": "grün vert verde зелёный зеленый 绿 绿色 緑",
    "yellow": "gelb jaune amarillo amarelo giallo жёлтый желтый 黄 黄色",
    "black": "schwarz noir negro preto nero чёрный черный 黑 黑色 黒",
    "white": "weiß blanc blanco branco bianco белый 白 白色",
    "meters": "метров метра метр mètres mètre metros metro metri 米 メートル 미터",
    "centimeters": (
        "zentimeter сантиметров сантиметра сантиметр centimètres centimètre centímetros centímetro centimetri 厘米"
    ),
    "kilometers": "километров километра километр kilomètres kilomètre kilómetros quilômetros chilometri 千米 公里",
    "millimeters": "миллиметров миллиметра миллиметр millimètres milímetros 毫米",
    "square meters": "平方米 quadratmeter",
    "square centimeters": "平方厘米 quadratzentimeter",
    "cubic centimeters": "立方厘米 kubikzentimeter",
    "kilograms": ("kilogramm килограммов килограмма килограмм kilogrammes kilogramme kilogramos quilogramas 千克 公斤"),
    "grams": "gramm граммов грамма грамм grammes gramos gramas grammi 克",
    "liters": "литров литра литр litres litros litri 升",
    "hours": "stunden stunde часов часа час heures heure horas hora ore 小时 時間 시간",
    "minutes": "minuten минут минуты минута minutos minuto minuti 分钟 分鐘 분",
    "seconds": "sekunden sekunde секунд секунды секунда secondes seconde segundos segundo secondi 秒",
    "days": "tage дней дня день jours jour días dias día giorni 天 일",
    "weeks": "wochen woche недель недели неделя semaines semaine semanas semana settimane 周 星期",
    "months": "monate месяцев месяца месяц meses mesi 个月",
    "years": "jahre jahr лет года год années années ans años anos anni 年 岁",
    "degrees": "grad градусов градуса градус degrés grados graus gradi 度",
    "percent": "prozent процентов процента процент pourcent",
    "dollars": "доллара долларов доллар dólares dólar dollari 美元",
    "yuan": "元 块",
    "euros": "евро 欧元",
    "rubles": "рублей рубля рубль",
    "things": "个 只 本 张 人 名 种 次 件 条 个人 个数 штук personas persone personnes personen человек 개 명",
    "no solution": "无解 没有解 无实数解 方程无解 原方程无解 方程组无解 解なし 해가_없다",
    "thousand": "tausend тысяч тысячи тысяча mil mille",
    "million": "millionen millones миллионов миллиона milhões milioni",
    "empty set": "空集 空集合 пустое_множество leere_menge ensemble_vide conjunto_vacío conjunto_vazio",
    "does not exist": "不存在 не_существует existiert_nicht n'existe_pas no_existe não_existe non_esiste",
    "infinitely many": (
        "无穷多 无数个 无限多 无穷多个 无限多个 无穷多解 无数解 无穷多个解 unendlich_viele бесконечно_много infinidad "
        "infinitas_soluciones infinitas_soluções infinite_soluzioni une_infinité une_infinité_de_solutions"
    ),
    "infinity": "无穷大 无穷 unendlich бесконечность infini infinito",
    "not ": "不 非",
    "at least ": "至少 mindestens au_moins al_menos almeno",
    "at most ": "至多 最多 höchstens au_plus",
    " or more": "以上",
    " or less": "以下",
    "about ": "大约 约 примерно ungefähr environ aproximadamente",
}
_ALONE = {
    "yes": "oui ja sí si sim tak evet 对",
    "no": "non não nao nee nie hayır 不 错",
    "even": "pair par pares pari paire",
    "no solution": (
        "keine_lösung keine_lösungen pas_de_solution pas_de_solutions aucune_solution sin_solución sin_soluciones "
        "no_hay_solución no_hay_soluciones нет_решений решений_нет нет_решения nessuna_soluzione sem_solução "
        "brak_rozwiązań geen_oplossing ingen_lösning çözüm_yok nincs_megoldás nemá_řešení"
    ),
    "red": "rot rosso",
    "March": "mars",
    "May": "mai mayo maio",
    "none": "keine aucun aucune ninguno ninguna nessuno nenhum",
    "all real numbers": (
        "alle_reellen_zahlen tous_les_réels todos_los_números_reales все_действительные_числа 全体实数 所有实数"
    ),
    "0": "null zéro cero zero_ nul noll sıfır ноль",
    "1": "eins un une uno una een jeden bir один 하나 一つ",
    "2": "zwei deux dos due dois twee dwa iki два 둘 二つ",
    "3": "drei trois tres tre três drie trzy üç три 셋 三つ",
    "4": "vier quatre cuatro quattro quatro cztery dört fyra четыре четири 넷 四つ",
    "5": "fünf cinq cinco cinque vijf pięć beş fem пять пет 다섯 五つ",
    "6": "sechs seis sei zes sześć altı шесть шест 여섯 六つ",
    "7": "sieben sept siete sette sete zeven siedem yedi семь седем 일곱 七つ",
    "8": "acht huit ocho otto oito osiem sekiz восемь осем 여덟 八つ",
    "9": "neun neuf nueve nove negen dziewięć dokuz девять девет 아홉 九つ",
    "10": "zehn dix diez dieci dez tien dziesięć десять десет 열",
    "11": "elf onze once_ undici одиннадцать",
    "12": "zwölf douze doce dodici doze двенадцать",
    "13": "dreizehn treize trece tredici тринадцать",
    "14": "vierzehn quatorze catorce quattordici catorze четырнадцать",
    "15": "fünfzehn quinze quince quindici пятнадцать",
    "16": "sechzehn seize dieciséis sedici dezesseis шестнадцать",
    "17": "siebzehn dix-sept diecisiete diciassette dezessete семнадцать",
    "18": "achtzehn dix-huit dieciocho diciotto dezoito восемнадцать",
    "19": "neunzehn dix-neuf diecinueve diciannove dezenove девятнадцать",
    "20": "zwanzig vingt veinte venti vinte двадцать",
    "30": "dreißig trente treinta trenta trinta тридцать",
    "40": "vierzig quarante cuarenta quaranta quarenta сорок",
    "50": "fünfzig cinquante cincuenta cinquanta пятьдесят",
    "60": "sechzig soixante sesenta sessanta sessenta шестьдесят",
    "100": "hundert cien cento сто",
    "1000": "tausend mille mil тысяча",
}
_EASTERN_DIGITS = {char: i for i, char in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2}
_EASTERN_TENS = {"十": 10, "百": 100, "千": 1000}
_EASTERN_SCALES = {"千": 3, "万": 4, "萬": 4, "亿": 8, "億": 8, "만": 4, "억": 8}
_SCALED = re.compile(rf"(?<![\d.])(\d{{1,12}}(?:\.\d{{1,8}})?)\s*([{''.join(_EASTERN_SCALES)}])")
"""Digits and an Eastern power of ten: `25万` is 250000."""
_CONNECTIVES = {"and": "et y e i и 和 且", "or": "o ou u и/или 或"}
"""Connectives that are also letters: translated only if a `\\text{}` holds nothing else."""


def _by_word(table: dict[str, str]) -> dict[str, str]:
    return {word.strip("_").replace("_", " "): english for english, words in table.items() for word in words.split()}


_WORDS, _JOINING = _by_word(_ANYWHERE), _by_word(_CONNECTIVES)
_COMPLETE = {word.lower(): word for word in _ANYWHERE} | _WORDS | _by_word(_ALONE)
_EASTERN = re.compile("|".join(sorted((w for w in _WORDS if ord(w[0]) >= 0x1100), key=len, reverse=True)))
_PHRASES = [word for word in _WORDS if " " in word]
_WORD = re.compile(r"(?<![\\\w])[^\W\d_]+(?:-[^\W\d_]+)?")
_ONLY_JOINING = re.compile(r"\\text\s*\{\s*([^{}\s]+)\s*\}")
_VALUE = r"(?:[a-zA-Z]\s*=\s*)?[-+]?(?:\d+(?:[./]\d+)?|\\[dt]?frac\s*\{[^{}]*\}\s*\{[^{}]*\}|\d*\\sqrt\s*\{[^{}]*\})"
_JOINED_VALUES = re.compile(
    rf"({_VALUE}(?:\s*,\s*{_VALUE})*),?\s+(?:(et|y|e|i|und|oraz|en|och|og|ve|и)"
    rf"|ou?|u|oder|lub|of|eller|veya|или)\s+({_VALUE})"
)
"""Values and the last one behind a connective that may be a letter: `1, 2 y 3`, `x=1 o x=2`."""
_FOREIGN_ARTICLE = re.compile(
    r"^(?:une?|eine?[rs]?|der|die|das|les?|la|el|un[ao]?|uma?|il|os?|as?|es ist|c'est|это)\s+(?=\S{3})", re.I
)
_WRAPPED = re.compile(r"^\\(?:text|mathrm|operatorname)\s*\{([^{}]*)\}$")


def in_english(text: str) -> str:
    """Return the text with the words of other languages that answers use in English."""
    wrapped = _WRAPPED.match(text)
    inner = (wrapped[1] if wrapped else text).strip(" .")
    found = _COMPLETE.get(inner.lower()) or _COMPLETE.get(_FOREIGN_ARTICLE.sub("", inner).lower())
    if found is not None:
        return rf"\text{{{found.strip()}}}" if not found.isdigit() else found
    number = _eastern_number(inner)
    if number is not None:
        return str(number)
    joined = _JOINED_VALUES.fullmatch(text)
    if joined is not None:
        return rf"{joined[1]}\text{{ {'and' if joined[2] else 'or'} }}{joined[3]}"
    text = _ONLY_JOINING.sub(_joined, text)
    if text.isascii() and not any(phrase in text for phrase in _PHRASES) and _WORD.search(text) is None:
        return text
    text = _SCALED.sub(_in_digits, text)
    text = _EASTERN.sub(lambda m: f" {_WORDS[m[0]]} ", text)
    return _WORD.sub(lambda m: _WORDS.get(m[0].lower(), m[0]), text)


def _in_digits(match: re.Match[str]) -> str:
    value = Fraction(match[1]) * 10 ** _EASTERN_SCALES[match[2]]
    return f"{value} " if value.denominator == 1 else match[0]


def _eastern_number(text: str) -> int | None:
    """Return the number that Chinese and Japanese numerals below 10,000 write, such as 二十五; None for other texts."""
    if not text or not all(char in _EASTERN_DIGITS or char in _EASTERN_TENS for char in text):
        return None
    total, digit, last_tens = 0, None, 10_000
    for char in text:
        if char in _EASTERN_DIGITS:
            if digit:
                return None  # digits side by side are no number of this form
            digit = _EASTERN_DIGITS[char]
        else:
            if _EASTERN_TENS[char] >= last_tens:
                return None
            last_tens = _EASTERN_TENS[char]
            total += (1 if digit is None else digit) * last_tens
            digit = None
    return total + (digit or 0)


def _joined(match: re.Match[str]) -> str:
    """Return the English connective for a lower-case one between two values; a letter alone is a name."""
    joins = match[1] in _JOINING and match.start() > 0 and match.end() < len(match.string)
    return rf"\text{{ {_JOINING[match[1]]} }}" if joins else match[0]


# Phrases -------------------------------------------------------------------------------------------------------------

_MEANINGS = {
    r"\emptyset": (
        "no solution|no solution exist|no real solution exist|no such number exist|no real solution"
        "|no integer solution|no real root|no root|no such number|no such integer"
        "|no such value|no such x|no value|none|empty set|empty|null set|no integer|no possible value|no such function"
    ),
    r"\infty": (
        "infinity|infinite|infinitely many|infinitely many solution|infinite solution|infinite number of solution"
        "|infinite number|infinitely many value|positive infinity|plus infinity|infinitely"
    ),
    r"-\infty": "negative infinity|minus infinity",
    r"\mathbb{R}": (
        "all real number|all real|every real number|any real number|set of real number|set of all real number"
        "|real number|all of real number|all real value|all real x"
    ),
    r"\mathbb{Z}": "all integer|integer|every integer|any integer|set of integer|set of all integer",
    r"\mathbb{Q}": "all rational number|rational number|set of rational number|all rational",
    r"\mathbb{N}": "all natural number|natural number|set of natural number|all positive integer",
    r"\mathbb{C}": "all complex number|complex number|set of complex number",
}
_SYMBOLS = {phrase: symbol for symbol, phrases in _MEANINGS.items() for phrase in phrases.split("|")}
_SYNONYMS = {
    "dne": "not exist",
    "undefined": "not exist",
    "defined": "exist",
    **dict.fromkeys(("diverge", "diverges", "divergent"), "not converge"),
    "convergent": "converge",
    "impossible": "not possible",
    "grey": "gray",
    "nonexistent": "not exist",
    "unequal": "not equal",
    "coloured": "colored",
    "correct": "true",
    "incorrect": "false",
}
_MONTH_NAMES = "january february march april may june july august september october november december"
_MONTHS = _MONTH_NAMES.split()
_DAYS = ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]
_SHORT = {name[:3]: name for name in (*_MONTHS, *_DAYS)} | {"sept": "september", "tues": "tuesday", "thurs": "thursday"}
_DIGITS = "zero one two three four five six seven eight nine ten"
_NUMBERS = {word: str(i) for i, word in enumerate(_DIGITS.split())}
_ORDINAL_WORDS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth"
ORDINALS = {word: str(i) for i, word in enumerate(_ORDINAL_WORDS.split(), start=1)}
_ROMAN = {"i": "1", "ii": "2", "iii": "3", "iv": "4", "qi": "1", "qii": "2", "qiii": "3", "qiv": "4"}
_ONE_WORD = _SHORT | _NUMBERS | ORDINALS | _SYNONYMS
_AGREEING, _REFUSING = frozenset({"true", "t", "yes"}), frozenset({"false", "f", "no"})
_SUBJECT = (
    r"(?:it|they|this|that|these|there|we|he|she|(?:the|this|that) "
    r"(?:limit|series|sequence|integral|answer|function|graph|curve|set|sum|system|equation|shape|figure|line|lines))"
)
_OPENING = re.compile(rf"^(?:{_SUBJECT} (?=\S))?(?:(?:is|are|was|be|has|have|does|do|will be) (?=\S))?")
_ASSENT = re.compile(
    r"^(yes|no|true|false) (?:it|they|this|that|there|he|she|we) (?:is|are|does|do|can|has|have|will)(?: not)?$"
)
_ARTICLES = frozenset(["a", "an", "the", "of", "on", "in", "straight", "angled"])
_CLASS_NOUNS = "function triangle number set series sequence equation curve graph figure shape quadrilateral"
_CLASSES = frozenset(_CLASS_NOUNS.split())
_WINS = frozenset(["win", "always win", "will win", "can win", "has winning strategy", "have winning strategy"])
"""What follows the name of the player who wins."""


def meant_symbol(text: str) -> str:
    """Return the symbol that a phrase means (`no solution` is `\\emptyset`); the text itself if it means none."""
    inner = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text).strip()
    if re.fullmatch(r"\\\{\s*\\?\s*\\\}", inner):
        return r"\emptyset"
    if re.fullmatch(r"[A-Za-z][A-Za-z' ,.-]{2,60}", inner) is None:
        return text
    phrase = " ".join(phrase_words(inner))
    if phrase.startswith(("no ", "none ")):
        phrase = re.sub(r"^(no such) [a-z]$", r"\1 x", phrase.removesuffix(" exist"))
    return _SYMBOLS.get(phrase, text)


def phrase_words(text: str) -> list[str]:
    """Return the words that carry the meaning of a phrase: without articles, subjects and plurals, synonyms as one."""
    text = re.sub(r"(?:'|\s+n')t\b", " not", re.sub(r"n't\b", " not", text.lower()))
    text = re.sub(r"[^a-z0-9]+", " ", re.sub(r"\b(it|that|there|they)'(?:s|re)\b", r"\1 is", text)).strip()
    assent = _ASSENT.match(text)
    if assent is not None:
        return [assent[1]]
    words: list[str] = []
    text = text.replace("not exist", "nonexistent")
    for word in _OPENING.sub("", text).split():
        words += _ONE_WORD.get(word, word).split() if word not in _ARTICLES else []
    is_denied = words.count("not") % 2 == 1
    words = [_singular(word) for word in words if word not in ("does", "do", "is", "are")]
    if not words:
        return text.split()
    if any(month in words for month in _MONTHS) and len(words) == 2:
        words.sort(key=str.isdigit)  # `30 October` is `October 30`
    others = [word for word in words if word != "not"]
    return ["not", *others] if is_denied else others


def _singular(word: str) -> str:
    if len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")):
        return word.removesuffix("s")
    return word


def same_phrase(gold: str, answer: str) -> bool:
    """Return whether two phrases mean the same: `the ellipse` is `an ellipse`, `even` is `an even function`."""
    gold_words, answer_words = phrase_words(gold), phrase_words(answer)
    if gold_words == answer_words:
        return True
    both = {*gold_words, *answer_words}
    if both <= _AGREEING or both <= _REFUSING or _same_quadrant(gold, answer):
        return True
    longer, shorter = sorted((gold_words, answer_words), key=len, reverse=True)
    is_winner = " ".join(longer[len(shorter) :]) in _WINS and longer[: len(shorter)] == shorter
    return len(shorter) > 0 and (is_winner or (longer[:-1] == shorter and longer[-1] in _CLASSES))


def _same_quadrant(gold: str, answer: str) -> bool:
    return "quadrant" in gold.lower() and _quadrant(gold) == _quadrant(answer) is not None


def _quadrant(text: str) -> str | None:
    """Return the number of a quadrant: of `third quadrant`, `Quadrant III`, `QIII` and `3`."""
    words = re.findall(r"[a-z]+|\d", re.sub(r"(?<=\d)(?:st|nd|rd|th)\b", "", text.lower()))
    found = [word for word in words if word not in ("quadrant", "the", "in", "text")]
    names = _ROMAN | ORDINALS | _NUMBERS
    return names.get(found[0], found[0]) if len(found) == 1 else None
