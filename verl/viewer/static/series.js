// SPDX-License-Identifier: Apache-2.0
// From logged columns to lines: smoothing, and time instead of steps.

const SECONDS = ["timing_s/step", "perf/time_per_step"]; // of a step; the first that is logged

// Returns an exponential moving average, corrected for its start: the mean of all values so far at weight 1.
export function smoothed(values, weight) {
  let sum = 0;
  let mass = 0;
  return values.map((value) => {
    if (value === null) {
      return null;
    }
    sum = weight * sum + value;
    mass = weight * mass + 1;
    return sum / mass;
  });
}

// Returns the seconds of training at the end of each step; null without logged seconds. Time between a run's end
// and its resumption does not count.
export function trainingSeconds({ step, metrics }) {
  const name = SECONDS.find((one) => metrics[one]);
  let total = 0;
  return name ? step.map((_, index) => (total += metrics[name][index] ?? 0)) : null;
}

// Returns x and y without the steps that lack the metric, so that rare values, as of validation, are connected.
export function known(x, y) {
  const kept = y.map((value, index) => (value === null ? -1 : index)).filter((index) => index >= 0);
  return { x: kept.map((index) => x[index]), y: kept.map((index) => y[index]) };
}
