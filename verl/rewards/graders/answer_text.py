# SPDX-License-Identifier: Apache-2.0
r"""Read answers as text: words, choices, units, and numbers as people write them.

`½`, `1e5`, `90°`, `5\,\mathrm{cm}` become plain LaTeX; math-verify does not read them, or reads their words
as products of letters. Meant for short texts: some patterns take quadratic time.
"""
# ruff: noqa: RUF001 (symbols that look like others are what is replaced)

import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

_NAMES = """
    millimeter mm millimetre|centimeter cm centimetre|decimeter dm|meter m metre|kilometer km kilometre
    inch in inches|foot ft feet|yard yd|mile mi|acre|hectare
    second s sec|minute min|hour h|day|week|month|year yr
    milligram|gram g|kilogram kg|ton tonne|pound lb lbs|ounce oz|milliliter ml|liter l litre|gallon gal
    dollar usd $|cent|euro €|rupee ₹|yen ¥|sterling £|degree deg|radian rad|celsius c|fahrenheit f
    newton n|joule j|watt w|volt v|hertz hz|mole mol
"""
_RATES = {"mph": ("mile", "hour"), "kmh": ("kilometer", "hour"), "kph": ("kilometer", "hour")}

# Of every spelling, in lower case, the units that it stands for.
UNITS: dict[str, tuple[str, ...]] = _RATES | {
    spelling: (names.split()[0],)
    for line in _NAMES.strip().splitlines()
    for names in line.split("|")
    for name in names.split()
    for spelling in (name, f"{name}s")
}
DIRECTIONS = frozenset(
    ("am", "pm", "north", "south", "east", "west", "left", "right", "up", "down", "increase", "decrease")
)


SYMBOLS = str.maketrans(
    {"−": "-", "–": "-", "÷": "/", "⁄": "/", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "±": r"\pm "}
    | {"°": r"^\circ ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne "}
    | {"∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", '"': ""}
)
RAISED, LOWERED = re.compile("[⁰¹²³⁴-⁹⁺⁻ⁿ]+"), re.compile("[₀-₉]+")
VULGAR_FRACTION = re.compile("[¼-¾⅐-⅞]")
ROOT = re.compile(r"√ ?(?:(\d+|[a-zA-Z])|\{([^{}]*)\}|\(([^()]*)\))")
UNSEEN = re.compile(r"\\(?:left|right|displaystyle|[bB]igg?[lr]?)(?![a-zA-Z])|\\!|`")
SPACE = re.compile(r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-zA-Z])|\s+")
BARE_COMMAND = re.compile(r"(?<![\\A-Za-z])(pi|sin|cos|tan|cot|sec|csc|log|ln)(?![A-Za-z])")
IN_TEXT = re.compile(
    r"\\(?:(text[a-z]*|mbox|hbox|emph)|mathrm|mathbf|mathit|mathsf|operatorname) ?\{([^{}]*)\}"
)
LEAD = re.compile(
    r'\A(?:\\approx ?|"?(?:the )?(?:final |correct )?(?:answer|option|choice)(?: is:?|:)[ "]*)', re.IGNORECASE
)

DIGIT_GROUPS = re.compile(r"(?<=\d)(?: |\{,\})(?=\d{3}(?!\d))")
MIXED_NUMBER = re.compile(r"(?<![\d.])(\d+) (\d+) ?/ ?(\d+)(?![\d.])")
SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?\d+)(?![\w.])")
REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar) ?\{(\d+)\}")
DEGREES = re.compile(r"\^ ?(?:\\circ(?![a-zA-Z])|\{ ?\\circ ?\})")
ANGLE = re.compile(rf"(\d+(?:\.\d+)?) ?{DEGREES.pattern}")
ANGLE_FUNCTION = re.compile(r"(?:sin|cos|tan|cot|sec|csc)(?![a-z])")

CURRENCY = re.compile(r"^ ?(-?) ?\\?(\$(?=[^$]*$)|[€£¥₹]) ?(?=[\d.])")
PERCENT = re.compile(r'" *(?:percent|pct) *"|\b(?:percent|pct)\b|(?<!\\)%')
RATE = re.compile(r"(?<=[\d})]) ?([A-Za-z]{1,2} ?/ ?(?:s|h|hr|min|sec|L|kg|m|mol))(?![A-Za-z])")
LETTER_UNIT = re.compile(r"(?<=\d) ([mghsLNJWV])$")
HALF_OF_DAY = re.compile(r'(?<=\d)([ "]*)([ap])\.? ?m\b\.?', re.IGNORECASE)
SEPARATOR = re.compile(r',? *(?:" *(?:and|or) *"|\b(?:and|or)\b) *')
ORDINAL = re.compile(r'(?<=\d) ?(?:\^ ?\{? ?)?"?(?:st|[nr]d|th)"? ?\}?$')
LABEL = re.compile(r'^[^="]*"[^"]*"[^=]*=')
TRAILING_WORDS = re.compile(r'(?: *"(?:[^"\d]|\^ ?\{?[23])*"(?: ?\^ ?(?:[23]|\{ ?[23] ?\}))?)+[ .]*$')
BARE_WORD = re.compile(r"(?<![\\A-Za-z_^'])[A-Za-z][A-Za-z'-]*[A-Za-z]")
FUNCTION = re.compile(
    r"(?:(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|exp|sqrt|frac|max|gcd|lcm|mod|det|pi|inf(?:inity)?)[xyt]?"
)
PHRASE = re.compile(r"(?:[^\W\d_]++[ ,;:.!?'-]*+)++")
WORD = re.compile("(?=[a-z]*[aeiou]|.*[^a-z])..+|.{4,}", re.IGNORECASE)  # the others are products, like `xy`

CHOICE = re.compile(
    r"(?:(?:option|choice) )?\(?([A-H])\)?\.?|\(?([A-H])(?:[.:]|\)[.:]?) ?(.*)", re.IGNORECASE | re.DOTALL
)
OTHER_CHOICE = re.compile(r"(?<![A-Za-z])[A-H][.:)]|\b(?:or|and) \(?[A-H]\b")
IN_BASE = re.compile(r"\(?([0-9A-F]*\d[0-9A-F]*)\)?_ ?\{? ?(\d+) ?\}?")


class Answer(NamedTuple):
    """An answer, read."""

    text: str  # all of it, without commands that only change its looks
    value: str  # LaTeX without units; what remains of words is in quotes
    units: frozenset[str] = frozenset()
    directions: frozenset[str] = frozenset()  # `north`, `increase`, `pm`


def read(text: str) -> Answer:
    marked = LEAD.sub("", _to_latex(text), count=1)
    money = CURRENCY.match(marked)
    marked = CURRENCY.sub(r"\1", marked)
    marked = re.sub(r"(?<!\\)\$", "", marked).lstrip(" *").rstrip(" *.")
    text = _squeeze(marked.replace('"', ""))
    if _is_phrase(text):
        return Answer(text, f'"{text}"')
    value = LABEL.sub("", _mark_words(_to_numbers(marked)), count=1)
    trailing = TRAILING_WORDS.search(value)
    if trailing is not None and trailing.start() > 0:
        value = value[: trailing.start()]
    words = re.findall("[a-z]+", trailing[0].casefold()) if trailing is not None else []
    words += [money[2]] if money is not None else []
    units = {unit for word in words for unit in UNITS.get(word, ())}
    return Answer(text, _squeeze(value), frozenset(units), frozenset(words) & DIRECTIONS)


def same_text(answer: Answer, truth: Answer) -> bool | None:
    """Compare two answers as text; None leaves the decision to mathematics."""
    if answer.text == truth.text:
        return bool(answer.text)
    choice, true_choice = choice_of(answer.text), choice_of(truth.text)
    if choice and true_choice:  # a letter, and the text of the choice if given
        texts = {choice[1], true_choice[1]} - {""}
        return choice[0] == true_choice[0] and len(texts) < 2
    if not answer.value or not truth.value:
        return False
    if '"' in answer.value + truth.value:
        return _phrase(answer.text) == _phrase(truth.text)
    for given, right in ((answer.units, truth.units), (answer.directions, truth.directions)):
        if given and right and given != right:
            return False
    if answer.value == truth.value:
        return True
    based, truth_based = IN_BASE.fullmatch(answer.value), IN_BASE.fullmatch(truth.value)
    if based and truth_based:
        return based.groups() == truth_based.groups()
    if based or truth_based:  # the base of one is understood
        return (based[1] if based else answer.value) == (truth_based[1] if truth_based else truth.value)
    return None


def choice_of(text: str) -> tuple[str, str] | None:
    """Return the letter of a choice and its text, which may be empty; None if this is not one choice."""
    match = CHOICE.fullmatch(text)
    if match is None or OTHER_CHOICE.search(match[3] or ""):
        return None
    return (match[1] or match[2]).upper(), _phrase(match[3] or "")


def _to_latex(text: str) -> str:
    r"""Replace symbols by LaTeX, remove what is not seen, and put quotes around words in `\text{}`."""
    text = RAISED.sub(lambda match: f"^{{{unicodedata.normalize('NFKC', match[0])}}}", text)
    text = LOWERED.sub(lambda match: f"_{{{unicodedata.normalize('NFKC', match[0])}}}", text)
    text = VULGAR_FRACTION.sub(_read_fraction, text)
    text = unicodedata.normalize("NFKC", text.translate(SYMBOLS)).translate(SYMBOLS)
    text = SPACE.sub(" ", UNSEEN.sub("", text))
    text = re.sub(r"\\[dtc]frac(?![a-z])", r"\\frac", text).replace(r"\varnothing", r"\emptyset")
    unwrapped = 1
    while unwrapped:
        text, unwrapped = IN_TEXT.subn(_unwrap, text)
    text = BARE_COMMAND.sub(r"\\\1 ", text)
    return ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2] or match[3]}}}", text).strip()


def _read_fraction(match: re.Match[str]) -> str:
    over, under = unicodedata.normalize("NFKC", match[0]).split("⁄")
    return rf"\frac{{{over}}}{{{under}}}"


def _unwrap(match: re.Match[str]) -> str:
    is_text, content = match[1], match[2].replace('"', "")
    if not is_text and FUNCTION.fullmatch(content):
        return rf"\{content} "
    return f" {content}" if not is_text and len(content) == 1 else f'"{content}"'


def _to_numbers(text: str) -> str:
    text = MIXED_NUMBER.sub(r"\1\\frac{\2}{\3}", DIGIT_GROUPS.sub("", text))
    text = SCIENTIFIC.sub(r"(\1 \\cdot 10^{\2})", text)
    text = REPEATING.sub(_repeating_decimal, text)
    if ANGLE_FUNCTION.search(text):
        return ANGLE.sub(r"(\\frac{\1\\pi}{180})", text)
    text = re.sub(rf'(?:{DEGREES.pattern}) ?"? ?([CF])\b"?', r'"\1"', text)
    return DEGREES.sub('"degree"', text) if len(DEGREES.findall(text)) == 1 else DEGREES.sub("", text)


def _repeating_decimal(match: re.Match[str]) -> str:
    whole, fixed, repeated = match.groups()
    value = Fraction(int(f"0{whole}{fixed}{repeated}") - int(f"0{whole}{fixed}"))
    value /= 10 ** len(fixed) * (10 ** len(repeated) - 1)
    return rf"(\frac{{{value.numerator}}}{{{value.denominator}}})"


def _mark_words(text: str) -> str:
    """Put quotes around words, and commas between answers that `and` or `or` joins."""
    text = PERCENT.sub(r"\\%", SEPARATOR.sub(" , ", text))
    text = HALF_OF_DAY.sub(r"\1\2m", text)
    text = LETTER_UNIT.sub(r'"\1"', RATE.sub(r'"\1"', ORDINAL.sub("", text)))
    parts = text.split('"')
    parts[::2] = [BARE_WORD.sub(_mark_word, part) for part in parts[::2]]
    return '"'.join(parts)


def _mark_word(match: re.Match[str]) -> str:
    word, before = match[0], match.string[: match.start()]
    if len(word) < 3:  # `5 cm` has a unit, `2 rs` is a product
        is_word = before.rstrip()[-1:] in set("0123456789})") and word.casefold() in UNITS.keys() | DIRECTIONS
    else:
        is_word = before[-1:] in ("", " ") and WORD.fullmatch(word) and not FUNCTION.fullmatch(word)
        is_word = is_word or word.casefold() in UNITS
    return f'"{word}"' if is_word else word


def _is_phrase(text: str) -> bool:
    """Return whether a text is words and nothing else."""
    if not PHRASE.fullmatch(text):
        return False
    words = re.findall(r"[^\W\d_]+", text)
    if any(FUNCTION.fullmatch(word) for word in words):
        return False
    return any(WORD.fullmatch(word) for word in words if word not in ("and", "or"))


def _phrase(text: str) -> str:
    return re.sub(r"^(?:an?|the) (?=..)|[{}]", "", text.casefold().strip(" .!?"))


def _squeeze(text: str) -> str:
    """Remove spaces that separate no words and no numbers."""
    return re.sub(r" *([^\w ]) *", r"\1", re.sub(" +", " ", text)).strip()
