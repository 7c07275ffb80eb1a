// Replicas of a fleet: a table with their load, and what has happened to them. Hidden where one process is all.

import { byId, el, table, update } from "./dom.js";
import { percent, plural, seconds, whole } from "./format.js";

const HEADS = [
  ["replica", "lead"], ["state", "lead"], ["running", "number"], ["waiting", "number"], ["KV in use"], ["cache hits", "number"],
  ["up", "number"], ["place"], ["adapters used last"],
];

export function showReplicas(fleet) {
  byId("fleet-panel").hidden = !fleet;
  if (!fleet) return;
  const serving = fleet.data.filter((each) => each.state === "serving").length;
  const said = [`${serving} of ${plural(fleet.wanted, "replica")} serve`];
  if (fleet.autoscale) said[0] += ` (${fleet.autoscale.min} to ${fleet.autoscale.max} by load)`;
  if (fleet.starting) said.push(`${whole(fleet.starting)} starting`);
  if (fleet.held_requests) said.push(`${plural(fleet.held_requests, "request")} wait for one`);
  said.push(`${whole(fleet.lost)} lost`, plural(fleet.replays, "replay"), `${whole(fleet.drained)} drained`);
  byId("fleet-caption").textContent = said.join(" · ");
  const rows = fleet.data.map((each) => [
    each.id,
    el("span", `tag ${each.state === "serving" ? "good" : ""}`, each.state),
    whole(each.running),
    whole(each.waiting),
    usage(each.kv_cache_usage),
    each.prefix_cache_hit_rate === null ? "–" : percent(each.prefix_cache_hit_rate),
    seconds(each.up_seconds),
    each.place,
    each.adapters.join(", ") || "–",
  ]);
  update(byId("replicas"), rows.length ? table(HEADS, rows) : el("p", "empty", "No replica runs now; the first request starts one."),
  );
}

function usage(share) {
  const part = el("span");
  part.style.width = percent(share);
  const bar = el("div", "reach part-2", part);
  bar.title = `${percent(share)} of its KV pool`;
  return bar;
}
