// Tables of running sequences, and of adapters with their slots.

import { actionOf } from "./adapters.js";
import { byId, el, set, table, update } from "./dom.js";
import { bytes, percent, plural, seconds, whole } from "./format.js";
import { hue, namespaceOf } from "./palette.js";
import { short } from "./requests.js";

const LAST = 5; // characters of a slot's name that are never cut

export function showSequences(engine) {
  const { sequences, stats } = engine;
  const unseen = stats.running - sequences.length;
  byId("sequences-caption").textContent =
    `${whole(stats.running)} running, ${whole(stats.waiting)} waiting` + (unseen > 0 ? `; the first ${sequences.length}` : "");
  const withTenants = sequences.some((each) => each.tenant);
  const heads = [
    ["model", "lead"], ...(withTenants ? [["tenant"]] : []), ["prompt", "lead"], ["cached", "number"], ["of", "number"],
    ["answer", "number"], ["drafts", "number"], ["form"], ["age", "number"],
  ];
  const rows = sequences.map((each) => [
    [el("span", `dot ${hue(namespaceOf(each, engine))}`), short(each.adapter ?? "base model")],
    ...(withTenants ? [short(each.tenant ?? "")] : []),
    reach(each, hue(namespaceOf(each, engine))),
    whole(each.cached),
    whole(each.prompt),
    whole(each.generated),
    each.drafted ? whole(each.drafted) : "",
    each.structured ? el("span", "tag", "grammar") : "",
    seconds(each.seconds),
  ]);
  update(byId("sequences"), sequences.length ? table(heads, rows) : el("p", "empty", "No sequence is running."),
  );
}

/** Progress of a prompt: cached, computed, remaining tokens. */
function reach({ prompt, cached, computed }, color) {
  const parts = [["cached", cached], ["done", Math.min(computed, prompt) - cached], ["todo", prompt - computed]];
  const bar = el("div", `reach ${color}`);
  for (const [name, size] of parts) {
    const part = el("span", name);
    part.style.width = `${(100 * Math.max(0, size)) / prompt}%`;
    bar.append(part);
  }
  bar.title = `${plural(cached, "token")} cached, ${whole(Math.max(0, Math.min(computed, prompt) - cached))} computed, ${whole(Math.max(0, prompt - computed))} to do`;
  return bar;
}

export function showAdapters(engine) {
  const { adapters, slots, stats } = engine;
  const unseen = stats.adapters - adapters.length;
  byId("adapters-caption").textContent = slots.length
    ? `${plural(slots.length, "slot")}, ${whole(stats.adapters)} loaded, ${bytes(stats.adapters_host_bytes)} on the host` + (unseen > 0 ? `; the ${adapters.length} busiest` : "")
    : "";
  update(byId("slots"), ...slots.map(slot));
  byId("adapter-box").hidden = !slots.length;
  if (!slots.length) {
    update(byId("adapters"), el("p", "empty", "Adapters are off. Start with --enable-lora to serve them."));
    return;
  }
  const heads = [
    ["name", "lead"], ["where", "lead"], ["rank", "number"], ["size", "number"], ["requests", "number"],
    ["in a slot", "number"], ["running", "number"], ["", "lead action"],
  ];
  const rows = adapters.map((each) => [
    [el("span", `dot ${colorOf(each.name, engine)}`), short(each.name), each.activated ? el("span", "tag", "activated") : null],
    each.state === "ready" ? each.tier : each.state,
    each.rank, bytes(each.bytes), whole(each.requests),
    each.requests ? percent(each.hits / each.requests) : "–", whole(each.running), actionOf(each.name),
  ]);
  update(byId("adapters"), rows.length ? table(heads, rows) : el("p", "empty", "No adapter is loaded yet. One of --lora-dir is loaded when a request names it."));

  function slot({ adapter, ready, running, closing }) {
    if (adapter === null) return el("div", "slot vacant", el("b", "muted", "free"), el("small", "", "no adapter"));
    const state = closing ? "closing" : ready ? (running ? `${whole(running)} running` : "idle") : "loading";
    return set(el("div", `slot ${colorOf(adapter, engine)}`, ends(adapter), el("small", "", state)), { title: adapter });
  }
}

/** A name that fits any width: its middle is cut, and its last letters, by which names of a row differ, stay. */
function ends(name) {
  const tail = Math.max(0, name.length - LAST);
  return el("b", "", el("span", "", name.slice(0, tail)), el("span", "", name.slice(tail)));
}

/** Colour of an adapter: that of its first namespace; none where it is neither in the tree nor in a slot. */
function colorOf(name, engine) {
  const own = engine.namespaces.find((each) => each.adapter === name);
  const isUsed = own || engine.slots.some((each) => each.adapter === name);
  return isUsed ? hue(own ?? { adapter: name }) : "unused";
}
