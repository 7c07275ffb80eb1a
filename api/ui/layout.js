// Layout of the prefix tree, as plain numbers. Tokens run from left to right, one row per leaf; a node is as high as
// its subtree.

const LEAST_LINE = 5;
const MOST_LINE = 30;
const LIVE = 2; // rows of a running sequence

/** First time a node was seen, which keeps the rows in order; the server orders nodes by use. */
const firstSeen = new Map();

/**
 * Boxes {x, y, width, height} for nodes, and for the tokens that running sequences have beyond the tree.
 * `scale`: tokens over the whole width, `step`: tokens between two ticks, `left`: number of rows that do not fit,
 * the least recently used.
 */
export function layout(engine, width, height) {
  const root = treeOf(engine);
  const ends = [...leaves(root)];
  const kept = newest(ends, height / LEAST_LINE);
  prune(root, kept);
  const lines = [...kept].reduce((sum, item) => sum + item.lines, 0);
  const line = Math.min(MOST_LINE, height / Math.max(1, lines));
  const drawn = [];
  let top = 0;
  const place = (item) => {
    const y = top;
    if (item.children.length) item.children.forEach(place);
    else top += line * item.lines;
    drawn.push({ ...item, y, height: top - y });
  };
  root.children.forEach(place);
  const longest = Math.max(64, ...drawn.map((item) => item.start + item.tokens));
  const step = tick(longest / Math.max(2, width / 130));
  const scale = step * Math.ceil(longest / step);
  for (const item of drawn) {
    item.x = (item.start / scale) * width;
    item.width = Math.max(1.5, (item.tokens / scale) * width);
  }
  return { drawn, scale, step, left: ends.length - kept.size };
}

/** Merge nodes and the sequences' own tokens into one tree of items, in a stable order. */
function treeOf(engine) {
  const root = { children: [], start: 0, tokens: 0 };
  const items = engine.nodes.map((node) => {
    const { id, tokens, age } = node;
    return { key: `node-${id}`, node, tokens, age, lines: 1, children: [] };
  });
  items.forEach((item) => {
    const parent = items[item.node.parent] ?? root;
    item.start = parent.start + parent.tokens;
    parent.children.push(item);
  });
  for (const sequence of engine.sequences.filter(({ node }) => node >= -1)) {
    const parent = items[sequence.node] ?? root;
    const tokens = Math.max(0, sequence.tokens - sequence.shared);
    const item = { key: `sequence-${sequence.id}`, sequence, tokens, age: -1, lines: LIVE, start: sequence.shared, children: [] };
    parent.children.push(item);
  }
  if (firstSeen.size > 100000) firstSeen.clear();
  for (const item of items) if (!firstSeen.has(item.key)) firstSeen.set(item.key, firstSeen.size);
  sort(root, engine);
  return root;
}

function sort(item, engine) {
  const rank = ({ key, node, sequence }) =>
    sequence ? 1e9 + sequence.id : 1e6 * order(engine, node.namespace) + firstSeen.get(key);
  item.children.sort((a, b) => rank(a) - rank(b));
  item.children.forEach((child) => sort(child, engine));
}

/** Namespaces by name, the base model first. */
function order(engine, index) {
  const name = ({ adapter, tenant, salted }) => `${adapter ?? ""}\0${tenant}\0${salted}`;
  const own = name(engine.namespaces[index]);
  return engine.namespaces.filter((each) => name(each) < own).length;
}

function* leaves(item) {
  for (const child of item.children) {
    if (child.children.length) yield* leaves(child);
    else yield child;
  }
}

/** Choose rows: running sequences, then the most recently used nodes, as many as fit. */
function newest(ends, room) {
  const kept = new Set();
  let lines = 0;
  for (const item of [...ends].sort((a, b) => a.age - b.age)) {
    lines += item.lines;
    if (lines > room && kept.size) break;
    kept.add(item);
  }
  return kept;
}

/** Drop items without a kept row. */
function prune(item, kept) {
  const leads = (child) => (child.children.length ? prune(child, kept) > 0 : kept.has(child));
  item.children = item.children.filter(leads);
  return item.children.length;
}

/** Round up to 1, 2, 5, 10, 20, ... */
function tick(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= least);
}
