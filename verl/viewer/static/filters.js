// SPDX-License-Identifier: Apache-2.0
// Filters and order of the rollouts, as the address keeps them and the server takes them.

export const PAGE = 100; // rows
export const TURN_FILTERS = [
  "num_turns_min", "num_turns_max", "num_calls_min", "num_calls_max", "num_failures_min", "num_failures_max", "stop_reason",
];
export const FILTERS = [
  "text", "kind", "step_min", "step_max", "score_min", "score_max", "response_length_min", "response_length_max",
  "finish_reason", "data_source", "media", ...TURN_FILTERS,
];

// Returns the positions of the runs that the address names; all without a name.
export function chosenRuns(runs, params) {
  const names = params.getAll("run");
  const all = runs.map((_, number) => number);
  return names.length ? all.filter((number) => names.includes(runs[number].name)) : all;
}

// Returns the filters as parameters of a request.
export function filterQuery(numbers, params) {
  const given = FILTERS.filter((name) => params.get(name)).map((name) => [name, params.get(name)]);
  return [...numbers.map((number) => ["run", number]), ...given];
}

export function orderOf(params) {
  return { sort: params.get("sort") || "step", order: params.get("order") || "down" };
}

export const offsetOf = (params) => Number(params.get("offset")) || 0;
