// Stacked bars: parts of a step's time, and owners of the KV pool's pages.

import { byId, el, update } from "./dom.js";
import { milliseconds, percent, plural, whole } from "./format.js";

const PARTS = ["schedule", "inputs", "forward", "masks", "head", "sample", "commit"];
const ABOUT = {
  schedule: "who gets how many tokens",
  inputs: "the plan becomes tensors",
  forward: "the layers of the model",
  masks: "waiting for the masks of grammars",
  head: "logits",
  sample: "drawing tokens",
  commit: "tokens appended, pages entered in the tree",
  other: "answers sent, requests taken, in between",
};
const WINDOW = 10000; // milliseconds that times are averaged over

let seen = [];

/** Parts of the mean step of the last seconds; of all steps without a recent one. */
export function showStep(stats) {
  const now = performance.now();
  if (seen.length && stats.steps < seen[0].stats.steps) seen = [];
  seen.push({ now, stats });
  while (seen.length > 2 && now - seen[1].now > WINDOW) seen.shift();
  const recent = stats.steps > seen[0].stats.steps;
  const since = recent ? seen[0].stats : {};
  const grown = (name) => (stats[name] ?? 0) - (since[name] ?? 0);
  const steps = grown("steps");
  if (!steps) {
    update(byId("step"), el("p", "empty", "No step yet."));
    return;
  }
  const step = grown("seconds_step") / steps;
  const parts = PARTS.map((name) => ({ name, size: grown(`seconds_${name}`) / steps }));
  const named = parts.reduce((sum, part) => sum + part.size, 0);
  parts.push({ name: "other", size: Math.max(0, step - named) });
  update(byId("step"), ...bar(parts, step, milliseconds));
  byId("step-caption").textContent =
    `${milliseconds(step)} · ${plural(grown("computed_tokens") / steps, "token")} · ${recent ? "mean of the last 10 s" : "mean since the start"}`;
}

/** Pages of the KV pool by owner. */
export function showPool(stats, pageSize) {
  const inUse = stats.pages - stats.pages_available;
  const parts = [
    { name: "in use", size: inUse, hue: 2, about: "running sequences hold them" },
    { name: "kept for reuse", size: Math.max(0, stats.pages - inUse - stats.pages_free), hue: 5, about: "the tree holds them; given up when room is needed" },
    { name: "free", size: stats.pages_free, hue: 7, about: "nobody holds them" },
  ];
  update(byId("pool"), ...bar(parts, stats.pages, (pages) => percent(pages / stats.pages)));
  byId("pool-caption").textContent = `${whole(stats.pages * pageSize)} tokens in pages of ${pageSize}`;
}

function bar(parts, total, format) {
  const hue = (part, i) => `part-${part.hue ?? i}`;
  const segments = parts.map((part, i) => {
    const segment = el("span", hue(part, i));
    segment.style.flexGrow = Math.max(0, part.size / total);
    return segment;
  });
  const entries = parts.map((part, i) => {
    const entry = el("li", hue(part, i), el("span", "dot"), part.name, el("b", "", format(part.size)));
    entry.title = part.about ?? ABOUT[part.name];
    return entry;
  });
  return [el("div", "bar", ...segments), el("ul", "parts", ...entries)];
}
