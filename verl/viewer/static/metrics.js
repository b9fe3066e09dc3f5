// SPDX-License-Identifier: Apache-2.0
// Logged metrics by area, the important ones first. To add a key metric: a line in KEY.

export const KEY_AREA = "Key metrics";
export const PHASE_AREA = "Seconds per phase";

const KEY = [ // label, metrics of which the first logged one is shown
  ["Reward", ["reward/overall", "critic/score/mean"]],
  ["Validation", ["val/reward_score"]],
  ["Loss", ["train/loss"]],
  ["Validation loss", ["val/loss"]],
  ["Response length", ["response_length/mean"]],
  ["KL", ["actor/ppo_kl"]],
  ["KL to the reference", ["actor/kl_loss", "actor/kl_penalty"]],
  ["Entropy", ["actor/entropy", "actor/entropy_loss"]],
  ["Gradient norm", ["actor/grad_norm", "train/grad_norm"]],
  ["Engine mismatch", ["rollout/log_probs_diff_mean"]],
  ["Tokens per second", ["perf/throughput"]],
  ["Policy loss", ["actor/pg_loss"]],
];
const AREAS = [
  ["Reward", /^(reward|critic\/(score|rewards))(\/|$)/],
  ["Validation", /^val(idation)?(\/|$)/],
  ["Conversations", /^agent(\/|$)/],
  ["Length", /^(response|prompt)_length(\/|$)/],
  ["Policy", /^actor(\/|$)/],
  ["Critic", /^critic(\/|$)/],
  ["Engine and trainer", /^rollout(_corr)?(\/|$)/],
  ["Speed and memory", /^(perf|timing_per_token_ms)(\/|$)/],
  [PHASE_AREA, /^timing_s(\/|$)/],
];
const VALIDATION = /^val(idation)?\//;
const PHASES = [ // in the order of a step, which is the order of their colors
  "gen", "update_actor", "old", "ref", "reward", "adv", "validation", "save_checkpoint", "values", "update_critic",
  "sync_weights", "keep_rollouts",
];

// Returns [{ area, charts: [{ name, label }] }] of the metrics whose name contains the text, without empty areas;
// key metrics only if there is no text, as they are in their own areas too.
export function areasOf(names, wanted) {
  const text = wanted.toLowerCase();
  const found = names.filter((name) => name.toLowerCase().includes(text)).sort();
  const key = wanted ? [] : KEY.map(([label, choices]) => ({ label, name: choices.find((name) => names.includes(name)) }));
  const areas = new Map([[KEY_AREA, key.filter(({ name }) => name)], ...AREAS.map(([area]) => [area, []])]);
  for (const name of found) {
    const [area] = AREAS.find(([, pattern]) => pattern.test(name)) || [name.split("/")[0]];
    areas.set(area, [...(areas.get(area) || []), { name, label: "" }]);
  }
  return [...areas].filter(([, charts]) => charts.length).map(([area, charts]) => ({ area, charts }));
}

export const isValidation = (name) => VALIDATION.test(name);

// Returns the phases of a step that any of these runs logged, each at the index of its color.
export function phasesOf(names) {
  const logged = names.filter((name) => name.startsWith("timing_s/") && name !== "timing_s/step");
  const phases = logged.map((name) => name.replace("timing_s/", ""));
  const [usual, others] = [PHASES.filter((name) => phases.includes(name)), phases.filter((name) => !PHASES.includes(name))];
  return [...usual, ...others.sort()];
}
