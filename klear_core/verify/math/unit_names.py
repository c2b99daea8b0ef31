"""List the units, and the nouns that problems count. A word that is in none of these tables is not a unit."""

from __future__ import annotations

PREFIXES = {"k": 3, "M": 6, "G": 9, "c": -2, "m": -3, "µ": -6, "μ": -6, "u": -6, "n": -9, "p": -12}
LONG_PREFIXES = {"kilo": 3, "mega": 6, "giga": 9, "centi": -2, "milli": -3, "micro": -6, "nano": -9, "pico": -12}

METRIC_UNITS = {
    "m": ("m", "meter metre", "1", {"m": 1}),
    "g": ("g", "gram gramme", "1", {"g": 1}),
    "s": ("s", "second", "1", {"s": 1}),
    "l": ("L l", "liter litre", "1/1000", {"m": 3}),
    "j": ("J", "joule", "1000", {"g": 1, "m": 2, "s": -2}),
    "w": ("W", "watt", "1000", {"g": 1, "m": 2, "s": -3}),
    "n": ("N", "newton", "1000", {"g": 1, "m": 1, "s": -2}),
    "pa": ("Pa", "pascal", "1000", {"g": 1, "m": -1, "s": -2}),
    "hz": ("Hz", "hertz", "1", {"s": -1}),
    "v": ("V", "volt", "1000", {"g": 1, "m": 2, "s": -3, "A": -1}),
    "ohm": ("Ω Ω", "ohm", "1000", {"g": 1, "m": 2, "s": -3, "A": -2}),
    "f": ("F", "farad", "1/1000", {"g": -1, "m": -2, "s": 4, "A": 2}),
    "ev": ("eV", "electronvolt", "1602176634/10000000000000000000000000", {"g": 1, "m": 2, "s": -2}),
    "mol": ("mol", "mole", "1", {"mol": 1}),
    "cal": ("cal", "calorie", "1", {"calorie": 1}),
    "pc": ("pc", "parsec", "1", {"parsec": 1}),
}
"""Units that take prefixes: symbols, names, size in the base units, dimensions."""

OTHER_UNITS = {
    "in inch inches": ("0.0254", {"m": 1}),
    "ft foot feet": ("0.3048", {"m": 1}),
    "yd yard": ("0.9144", {"m": 1}),
    "mi mile": ("1609.344", {"m": 1}),
    "Å Å angstrom": ("1/10000000000", {"m": 1}),
    "sec": ("1", {"s": 1}),
    "min minute": ("60", {"s": 1}),
    "h hr hour": ("3600", {"s": 1}),
    "d day": ("86400", {"s": 1}),
    "wk week": ("604800", {"s": 1}),
    "month": ("1", {"month": 1}),
    "yr year": ("12", {"month": 1}),
    "decade": ("120", {"month": 1}),
    "mph": ("0.44704", {"m": 1, "s": -1}),
    "kph kmh kmph": ("5/18", {"m": 1, "s": -1}),
    "knot": ("1", {"knot": 1}),
    "acre": ("4046.8564224", {"m": 2}),
    "hectare ha": ("10000", {"m": 2}),
    "lb pound": ("453.59237", {"g": 1}),
    "oz ounce": ("28.349523125", {"g": 1}),
    "gm": ("1", {"g": 1}),
    "ton tonne": ("1", {"ton": 1}),
    "cc": ("1/1000000", {"m": 3}),
    "gal gallon": ("16", {"cup": 1}),
    "qt quart": ("4", {"cup": 1}),
    "pt pint": ("2", {"cup": 1}),
    "cup": ("1", {"cup": 1}),
    "tbsp tablespoon": ("1/16", {"cup": 1}),
    "tsp teaspoon": ("1/48", {"cup": 1}),
    "dollar usd buck": ("1", {"dollar": 1}),
    "cent penny pennies ¢": ("1/100", {"dollar": 1}),
    "euro eur": ("1", {"euro": 1}),
    "rupee inr": ("1", {"rupee": 1}),
    "yuan cny rmb": ("1", {"yuan": 1}),
    "ruble rouble rub": ("1", {"ruble": 1}),
    "peso": ("1", {"peso": 1}),
    "gbp": ("1", {"pound sterling": 1}),
    "krw": ("1", {"won": 1}),
    "yen jpy": ("1", {"yen": 1}),
    "degree deg": ("1", {"degree": 1}),
    "celsius centigrade": ("1", {"celsius": 1}),
    "fahrenheit": ("1", {"fahrenheit": 1}),
    "K kelvin": ("1", {"kelvin": 1}),
    "radian rad": ("1", {"radian": 1}),
    "arcsecond arcsec": ("1", {"arcsecond": 1}),
    "arcminute arcmin": ("60", {"arcsecond": 1}),
    "bit": ("1", {"bit": 1}),
    "byte": ("8", {"bit": 1}),
    "erg": ("1/10000", {"g": 1, "m": 2, "s": -2}),
    "dyne dyn": ("1/100", {"g": 1, "m": 1, "s": -2}),
    "M molar": ("1000", {"mol": 1, "m": -3}),
    "C coulomb": ("1", {"A": 1, "s": 1}),
    "A amp ampere": ("1", {"A": 1}),
    "T tesla": ("1000", {"g": 1, "s": -2, "A": -1}),
    "atm atmosphere": ("101325000", {"g": 1, "m": -1, "s": -2}),
    "au AU": ("1", {"astronomical unit": 1}),
    "ly lightyear": ("1", {"light year": 1}),
    "unit": ("1", {"unit": 1}),
}
"""Units without prefixes: names, then size in the base units and dimensions."""

_GENERIC_NOUNS = """
    arrangement case choice combination digit divisor element factor function group individual integer item
    multiple number object option outcome pair path people permutation person piece point possibility root route
    sample sequence set solution step subset term thing time total trial triple triplet tuple turn value way
    zero
"""
GENERIC_NOUNS = frozenset(_GENERIC_NOUNS.split())
"""Generic nouns for things that are counted: any of them may replace another, or be left out."""

_COUNTED_NOUNS = """
    acorn adult angle animal answer ant apple award bag bale ball balloon banana bar barrel basket batch batches
    batteries battery bead beaker bed bee berries berry bicycle bike bill bird biscuit block board boat bolt
    bone book bottle bouquet box boxes boy bracelet branch branches brick brother brownie bucket bug bulb burger
    bus buses bushel butterflies butterfly button cake can candies candle candy car card carrot carton cat chair
    chapter cherries cherry chicken child children chip chocolate circle class classes clock cloud coat coconut
    coin column computer container cookie copies copy couple cousin cow cracker crate crayon cube cupcake
    customer daisies daisy decoration desk dessert diagonal dice die dime dish dishes dog doll donut door
    doughnut draw dress dresses drink drop duck earring edge egg elephant email employee envelope episode eraser
    exam eye face families family file fish fishes flies flight flip floor flower fly flyer friend frog fruit
    game girl glass glasses goal goat grade grandchild grandchildren grape guest hamburger handshake hat hen hit
    hole home horse hotdog house insect jar jellybean jump kid kind kitten lamb lamp lap leaf leaves leg lemon
    lesson letter level line lion load loaf loaves log lollipop machine magazine man mango mangoes marble marker
    marshmallow match matches meal member men mistake move movie muffin mushroom nail necklace nephew newspaper
    nickel night note notebook novel nut orange outfit oyster pack package packet page painting pancake paper
    parent part passenger pastries pastry patties patty peach peaches peanut pear pebble pen pencil pet petal
    phone photo photograph picture pie pig pill pillow pin pizza plane plant plate player plum pole polygon
    portion post poster potato potatoes present prize problem puppies puppy puzzle quarter question quiz quizzes
    rabbit race rectangle report ribbon ring robot rock roll room rooster rose round row run sandwich scarf
    scarves scoop score seashell seat section seed segment senior serving shark sheep sheet shelf shell shelves
    ship shirt shoe shot show sibling side sister skip slice snack sock soda song spoke spoon spot square
    squirrel stair stamp star station stick sticker stone stop straw strawberries strawberry student subway
    sunflower sweet table teacher team test text throw ticket tile tin tire token tomato tomatoes toss tourist
    towel toy train tray tree triangle trip truck tube tulip turtle type vegetable vertex vertices video visitor
    vote wall watch watermelon wheel window wing woman women word worker
"""
COUNTED_NOUNS = frozenset(_COUNTED_NOUNS.split())
"""Specific nouns for things that are counted: they may be left out, but apples are not oranges.

These are the nouns that problems of GSM8K and MATH ask for most.
"""

_ADJECTIVES = """
    a all altogether an apart away big complex deep different distinct each even high large left
    long negative new nonnegative odd of old ordered positive possible prime real remaining small such tall the
    total unique valid whole wide
"""
ADJECTIVES = frozenset(_ADJECTIVES.split())

POWERS_BEFORE = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
POWERS_AFTER = {"squared": 2, "cubed": 3}

_NO_NOUNS = """
    about above additional after again almost also always and another any approximately are around as at away be because
    been before below between bigger both but by can cannot certain correct cubed decimal denominator did divided do
    does doubled either else equal equals exactly except extra factorial fail fails false few fewer fifth first for
    fourth from greater guess guessed had half halves has have he hence higher however if impossible incorrect infinity
    instead is it just larger least less let longer lower many maximum maybe me means might minimum minus mod modulo
    more most much must my nearly neither never no none nor not nothing now okay only optional or other others our out
    over perhaps plus possibly power probably quite rejected remainder right root roughly same second she short should
    shorter since smaller so some sometimes squared sufficient than that their them then there therefore these they
    third this those thus times to too true twice under undefined unknown unless until up upon usually very wait was
    approx est ish inverse reciprocal negated opposite complement conjugate tripled quadrupled thirds fourths fifths
    sixths sevenths eighths ninths tenth tenths hundredth hundredths thousandth thousandths millionths ninths alpha beta
    gamma delta theta lambda sigma omega sqrt choose infinitely exclusive inclusive ago ahead
    we were what when where which while will with without wrong yes yet you your
    mehr weniger oder nicht kein keine mindestens höchstens und etwa circa moins pas ou et environ más mas
    menos y casi não mais больше меньше более менее или не и примерно
"""
NO_NOUNS = frozenset(_NO_NOUNS.split())
"""Words after a number that are no unit: they change its value, deny it, or say something else of it."""

NOUN_JOINTS = frozenset(["of", "per", "in", "for", "from", "on", "with", "each", "a", "an", "every"])
"""Words between a noun and what it is of: `slices of pizza`, `pages per day`."""

CURRENCIES = {
    "$": "dollar", "\u20ac": "euro", "\u00a3": "pound sterling", "\u00a5": "yen", "\u20b9": "rupee", "\u20a9": "won",
    "\u20bd": "ruble", "\u20ba": "lira", "\u20aa": "shekel", "\u20b1": "peso", "\u20ab": "dong", "\u0e3f": "baht",
}  # fmt: skip
CURRENCY_CODES = {
    "USD": "$", "EUR": "\u20ac", "GBP": "\u00a3", "JPY": "\u00a5", "INR": "\u20b9", "Rs": "\u20b9", "Rs.": "\u20b9",
    "KRW": "\u20a9", "RUB": "\u20bd", "CAD": "$", "AUD": "$",
}  # fmt: skip
