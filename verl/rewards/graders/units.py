# SPDX-License-Identifier: Apache-2.0
"""Units and directions that an answer may name after its value."""

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
