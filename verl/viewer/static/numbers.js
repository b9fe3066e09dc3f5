// SPDX-License-Identifier: Apache-2.0
// Numbers as text: `0.0125`, `1.2e-7`, `123.5k`; labels of an axis share their digits and their unit.

const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
const MANY = 1e4; // from here on with a unit
const FEW = 1e-3; // below, with an exponent
const MAX_DIGITS = 8;

// Returns a number with up to four significant digits.
export function compact(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) {
    return "–";
  }
  const size = Math.abs(value);
  if (size !== 0 && size < FEW) {
    return trimmed(value.toExponential(2));
  }
  const [unit, letter] = unitOf(size);
  const scaled = value / unit;
  return Number.isInteger(scaled) ? scaled + letter : trimmed(scaled.toPrecision(4)) + letter;
}

// Returns the labels of an axis: distinct for distinct values; null stays empty.
export function tickLabels(values) {
  const known = values.filter((value) => value !== null);
  const largest = Math.max(0, ...known.map(Math.abs));
  const [unit, letter] = largest < FEW && largest > 0 ? exponentOf(largest) : unitOf(largest);
  const digits = digitsFor(Math.min(...gaps(known)) / unit);
  return values.map((value) => {
    if (value === null) {
      return "";
    }
    return Math.abs(value / unit) < 10 ** -MAX_DIGITS ? "0" : (value / unit).toFixed(digits) + letter;
  });
}

// Returns seconds as the labels of an axis: "45s", "1m 30s", "2h".
export function durationLabels(values) {
  return values.map((value) => (value === null ? "" : duration(value)));
}

// Returns seconds in their two largest units.
export function duration(seconds) {
  const whole = Math.round(seconds);
  const parts = [[Math.floor(whole / 86400), "d"], [Math.floor(whole / 3600) % 24, "h"],
    [Math.floor(whole / 60) % 60, "m"], [whole % 60, "s"]];
  const first = parts.findIndex(([count]) => count > 0);
  return first < 0 ? "0" : parts.slice(first, first + 2).filter(([count]) => count).map((part) => part.join("")).join(" ");
}

function unitOf(size) {
  return (size >= MANY && UNITS.find(([unit]) => size >= unit)) || [1, ""];
}

function exponentOf(size) {
  const exponent = Math.floor(Math.log10(size) + 1e-9);
  return [10 ** exponent, `e${exponent}`];
}

function gaps(values) {
  const found = values.slice(1).map((value, index) => Math.abs(value - values[index])).filter((gap) => gap > 0);
  return found.length ? found : [Math.abs(values[0]) || 1];
}

function digitsFor(step) {
  for (let digits = 0; digits < MAX_DIGITS; digits += 1) {
    const scaled = step * 10 ** digits;
    if (scaled >= 0.99 && Math.abs(scaled - Math.round(scaled)) < 1e-3 * scaled) {
      return digits;
    }
  }
  return MAX_DIGITS;
}

const trimmed = (text) => text.replace(/\.?0+(?=e|$)/, (zeros) => (text.includes(".") ? "" : zeros));
