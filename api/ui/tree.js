// Drawing of the prefix tree: boxes that move to their places of `layout`, with labels.

import { byId, el, set, svg, update } from "./dom.js";
import { plural, whole } from "./format.js";
import { layout } from "./layout.js";
import { hue, namespaceOf, title } from "./palette.js";
import { short } from "./requests.js";

const AXIS = 20;
const HEAD = 4;
const NAMED = 8; // namespaces in the legend

const holder = byId("tree");
const shapes = new Map();
let picture = null;
let items = new Map();
let engine = null;

export function showTree(next) {
  engine = next;
  legend();
  if (!engine.nodes.length && !engine.sequences.length) {
    empty();
    return;
  }
  draw();
}

new ResizeObserver(() => engine?.nodes.length && draw()).observe(holder);

function empty() {
  picture = null;
  shapes.clear();
  byId("tree-caption").textContent = "";
  holder.replaceChildren(el("p", "empty", "The tree is empty; the first request fills it. Ask something below."));
}

function draw() {
  picture ??= begin();
  const width = Math.max(100, holder.clientWidth);
  const height = holder.clientHeight - AXIS;
  const plan = layout(engine, width, height);
  axis(plan, width, height);
  items = new Map(plan.drawn.map((item) => [item.key, item]));
  const seen = new Set();
  for (const item of plan.drawn) {
    if (item.node) drawNode(item, seen);
    else drawTail(item, seen);
  }
  for (const [key, shape] of shapes) {
    if (!seen.has(key)) {
      shape.remove();
      shapes.delete(key);
    }
  }
  caption(plan.left);
}

function begin() {
  const made = { grid: svg("g"), boxes: svg("g"), labels: svg("g") };
  const root = svg("svg", { role: "img", "aria-label": "The prefix tree", "aria-describedby": "tree-caption" }, made.grid, made.boxes, made.labels);
  made.tip = el("div", "tip");
  made.tip.hidden = true;
  holder.replaceChildren(root, made.tip);
  root.addEventListener("pointermove", (event) => tell(event, made.tip));
  root.addEventListener("pointerleave", () => (made.tip.hidden = true));
  return made;
}

function axis({ scale, step }, width, height) {
  const ticks = [];
  for (let at = 0; at <= scale; at += step) {
    const x = (at / scale) * width;
    const anchor = at === 0 ? "start" : at + step > scale ? "end" : "middle";
    ticks.push(svg("line", { class: "grid", x1: x, x2: x, y1: 0, y2: height + 3 }));
    const text = svg("text", { class: "tick", x, y: height + 15, "text-anchor": anchor });
    text.textContent = at === 0 ? "0 tokens" : whole(at);
    ticks.push(text);
  }
  picture.grid.replaceChildren(...ticks);
}

function drawNode(item, seen) {
  const { node, x, y, width, height } = item;
  const leased = node.leases > 0;
  const color = hue(engine.namespaces[node.namespace]);
  box(item.key, `node ${color}${leased ? " leased" : ""}`, x, y, width, height, seen, item.key);
  if (node.pinned) pin(`${item.key}-pin`, x + width, y, seen);
  const long = `${whole(node.tokens)} tokens · ${plural(node.hits, "hit")}`;
  const text = [long, whole(node.tokens)].find((each) => each.length * 6.3 + 10 < width);
  if (text && height >= 14) label(`${item.key}-label`, text, x + 6, y + height / 2 + 4, leased, seen);
}

/** Tokens of a running sequence beyond the tree: computed, remaining, generated. */
function drawTail(item, seen) {
  const { sequence, x, y, width, height } = item;
  const color = hue(namespaceOf(sequence, engine));
  const done = Math.max(0, Math.min(1, (sequence.computed - sequence.shared) / Math.max(1, item.tokens)));
  box(`${item.key}-done`, `live ${color}`, x, y, width * done, height, seen, item.key);
  const rest = width * (1 - done);
  if (rest > 2) box(`${item.key}-todo`, `live todo ${color}`, x + width * done, y, rest, height, seen, item.key);
  box(`${item.key}-head`, `head ${color}`, x + width + 1, y, HEAD, height, seen, item.key);
}

function box(key, className, x, y, width, height, seen, owner) {
  let shape = shapes.get(key);
  if (!shape) {
    shape = svg("rect", { rx: 2 });
    shape.dataset.item = owner;
    shapes.set(key, shape);
    picture.boxes.append(shape);
  }
  const gap = height > 8 ? 1 : 0.4;
  set(shape, { class: className, x, y: y + gap / 2, width, height: Math.max(1, height - gap) });
  seen.add(key);
}

function label(key, text, x, y, on, seen) {
  let shape = shapes.get(key);
  if (!shape) {
    shape = svg("text");
    shapes.set(key, shape);
    picture.labels.append(shape);
  }
  set(shape, { class: on ? "label on" : "label", x, y });
  shape.textContent = text;
  seen.add(key);
}

/** Mark at the upper right of a node at which a pin ends. */
function pin(key, x, y, seen) {
  let shape = shapes.get(key);
  if (!shape) {
    shape = svg("path", { class: "pin" });
    shapes.set(key, shape);
    picture.labels.append(shape);
  }
  set(shape, { d: `M${x - 10},${y + 1}h9v9z` });
  seen.add(key);
}

function tell(event, tip) {
  const item = items.get(event.target.dataset?.item);
  tip.hidden = !item;
  if (!item) return;
  tip.textContent = item.node ? aboutNode(item) : aboutSequence(item);
  const bounds = holder.getBoundingClientRect();
  const left = Math.min(event.clientX - bounds.left + 14, bounds.width - tip.offsetWidth - 4);
  const above = event.clientY - bounds.top - tip.offsetHeight - 10;
  tip.style.left = `${Math.max(0, left)}px`;
  tip.style.top = `${above > 0 ? above : event.clientY - bounds.top + 16}px`;
}

function aboutNode({ node, start }) {
  const ago = `last used ${plural(Math.ceil(node.age / 2), "sequence")} ago`; // The clock ticks at each start and end of a sequence.
  const used = node.leases ? `in use by ${plural(node.leases, "sequence")}` : ago;
  return [
    title(engine.namespaces[node.namespace]),
    `${plural(node.tokens, "token")}, ${whole(start)} to ${whole(start + node.tokens)}`,
    `found ${plural(node.hits, "time")}`,
    used,
    node.pinned ? "pinned: evicted last" : null,
  ].filter(Boolean).join("\n");
}

function aboutSequence({ sequence, start }) {
  return [
    `${title(namespaceOf(sequence, engine))}: sequence ${sequence.id}`,
    `${plural(sequence.tokens, "token")}, of which ${whole(start)} in the tree`,
    sequence.computed < sequence.prompt
      ? `${plural(sequence.prompt - sequence.computed, "token")} of its prompt to compute`
      : `${plural(sequence.generated, "token")} of its answer`,
  ].join("\n");
}

function legend() {
  const tokens = engine.namespaces.map(() => 0);
  for (const node of engine.nodes) tokens[node.namespace] += node.tokens;
  const all = engine.namespaces.map((namespace, i) => ({ namespace, name: title(namespace), size: tokens[i] }));
  const named = all.sort((a, b) => b.size - a.size).slice(0, NAMED);
  const isBase = ({ namespace }) => Number(namespace.adapter === null);
  named.sort((a, b) => isBase(b) - isBase(a) || a.name.localeCompare(b.name));
  const chips = named.map(({ namespace, name, size }) =>
    el("li", hue(namespace), el("span", "dot"), short(name), el("span", "muted", `${whole(size)} tokens`)),
  );
  if (all.length > NAMED) chips.push(el("li", "muted", `and ${plural(all.length - NAMED, "smaller one")}`));
  const marks = chips.length ? el("li", "marks", el("span", "sample idle"), "kept", el("span", "sample"), "in use", el("span", "corner"), "pinned") : null;
  update(byId("legend"), ...[...chips, marks].filter(Boolean));
}

function caption(left) {
  const shown = engine.nodes.reduce((sum, node) => sum + node.tokens, 0);
  byId("tree-caption").textContent = [
    `${whole(shown)} tokens in ${plural(engine.nodes.length, "run")}`,
    engine.hidden_tokens ? `${whole(engine.hidden_tokens)} in older ones not shown` : null,
    left ? `${whole(left)} older ${left === 1 ? "branch" : "branches"} not drawn` : null,
  ].filter(Boolean).join(" · ");
}
