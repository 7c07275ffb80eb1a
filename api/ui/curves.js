// Sparklines of the last five minutes, with the newest value or the one under the pointer.

import { byId, el, say, set, svg } from "./dom.js";
import { digits, percent, seconds, whole } from "./format.js";

const SPAN = 300;
const WIDTH = 300;
const HEIGHT = 46;
const TOP = 3; // where the highest value is
const FRESH = 20; // seconds for which a value counts as current
const GAP = 15; // seconds without a value that a line bridges

const CURVES = [
  { title: "Throughput", unit: "tokens/s", hue: "part-2", values: [(p) => p.generated], format: whole },
  {
    title: "Prompt tokens found in the cache",
    unit: "",
    hue: "part-5",
    values: [(p) => (p.prompt ? p.cached / p.prompt : null)],
    format: percent,
    top: 1,
  },
  {
    title: "First token, median and 95th percentile",
    hue: "part-6",
    values: [(p) => p.first?.[0], (p) => p.first?.[1]],
    format: seconds,
  },
  {
    title: "Between tokens, median and 95th percentile",
    hue: "part-3",
    values: [(p) => p.between?.[0], (p) => p.between?.[1]],
    format: seconds,
  },
  {
    title: "In the queue, median and 95th percentile",
    hue: "part-1",
    values: [(p) => p.queued?.[0], (p) => p.queued?.[1]],
    format: seconds,
  },
  { title: "Sequences in a step, mean", hue: "part-2", values: [(p) => p.batch], format: digits },
  { title: "Drafts accepted", hue: "part-5", values: [(p) => p.drafted], format: percent, top: 1 },
  { title: "Sequences running, waiting", hue: "part-4", values: [(p) => p.running, (p) => p.waiting], format: whole },
];

let points = [];
const charts = CURVES.map(chart);
byId("curves").replaceChildren(...charts.map(({ card }) => card));

/** End time of the newest point, for the next request. */
export const newest = () => points.at(-1)?.at ?? -1;

export function forgetCurves() {
  points = [];
}

export function showCurves(more) {
  points = points.concat(more);
  const begin = newest() - SPAN;
  points = points.filter((point) => point.at > begin);
  charts.forEach((each) => each.update());
}

function chart({ title, unit, hue, values, format, top }) {
  const now = el("p", "now");
  const area = svg("path", { class: "area" });
  const lines = values.map((_, i) => svg("path", { class: i ? "line second" : "line" }));
  const floor = svg("line", { class: "floor", x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT });
  const ceiling = svg("line", { class: "ceiling", x1: 0, x2: WIDTH, y1: TOP, y2: TOP });
  const at = svg("line", { class: "at", y1: 0, y2: HEIGHT, visibility: "hidden" });
  const picture = svg(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    floor, ceiling, area, ...lines.toReversed(), at,
  );
  const high = el("span", "high");
  const span = el("p", "span", el("span", "", "5 min ago"), el("span", "", "now"));
  const card = el("article", `curve ${hue}`, el("h2", "", title), now, el("div", "frame", picture, high), span);
  let under = null;

  const x = (point) => WIDTH - ((newest() - point.at) / SPAN) * WIDTH;

  function tell() {
    const shown = under ? values.map((value) => value(under)) : values.map(latest);
    const texts = shown.map((value) => (value == null ? "–" : format(value)));
    const ago = under ? `${Math.round(newest() - under.at)} s ago` : unit;
    now.replaceChildren(texts[0], ...texts.slice(1).map((text) => el("small", "", ` / ${text}`)), el("small", "", ` ${ago ?? ""}`));
  }

  function update() {
    const highest = top ?? Math.max(1e-9, ...points.flatMap((point) => values.map((value) => value(point) ?? 0)));
    const y = (value) => HEIGHT - 1 - (value / highest) * (HEIGHT - 1 - TOP);
    say(high, highest > 1e-9 ? format(highest) : "");
    values.forEach((value, i) => set(lines[i], { d: path(value, x, y) }));
    set(area, { d: filled(values[0], x, y) });
    tell();
  }

  picture.addEventListener("pointermove", (event) => {
    const bounds = picture.getBoundingClientRect();
    const place = ((event.clientX - bounds.left) / bounds.width) * WIDTH;
    under = points.reduce((best, each) => (best && Math.abs(x(best) - place) < Math.abs(x(each) - place) ? best : each), null);
    if (under) set(at, { x1: x(under), x2: x(under), visibility: "visible" });
    tell();
  });
  picture.addEventListener("pointerleave", () => {
    under = null;
    set(at, { visibility: "hidden" });
    tell();
  });
  tell();
  return { card, update };
}

function latest(value) {
  const point = points.findLast((each) => value(each) != null);
  return point && newest() - point.at < FRESH ? value(point) : null;
}

/** Split points into connected segments: without missing values and long gaps. */
function runs(value) {
  const found = [];
  for (const point of points) {
    if (value(point) == null) continue;
    const last = found.at(-1)?.at(-1);
    if (last && point.at - last.at < GAP) found.at(-1).push(point);
    else found.push([point]);
  }
  return found;
}

const along = (run, value, x, y) =>
  "M" + run.map((point) => `${x(point).toFixed(1)},${y(value(point)).toFixed(1)}`).join("L");

function path(value, x, y) {
  return runs(value).map((run) => along(run, value, x, y) + (run.length > 1 ? "" : "h1.5")).join("");
}

/** Area path: the line, closed along the baseline. */
function filled(value, x, y) {
  const closed = (run) => `${along(run, value, x, y)}L${x(run.at(-1)).toFixed(1)},${HEIGHT}H${x(run[0]).toFixed(1)}Z`;
  return runs(value).filter((run) => run.length > 1).map(closed).join("");
}
