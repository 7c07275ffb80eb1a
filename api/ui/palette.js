// One colour for each namespace, the same as long as the page is open. The base model's is the quiet one.

const HUES = 9;
const given = new Map();

/** The class that carries the colour of a namespace. */
export function hue({ adapter, tenant = "", salted = false }) {
  const name = JSON.stringify([adapter, tenant, salted]);
  if (!given.has(name)) {
    const plain = adapter === null && ![...given.values()].includes(0);
    given.set(name, plain ? 0 : 1 + ([...given.values()].filter((each) => each > 0).length % (HUES - 1)));
  }
  return `ns-${given.get(name)}`;
}

/** What a namespace is called. */
export function title({ adapter, tenant = "", salted = false }) {
  return [adapter ?? "base model", tenant, salted ? "salted" : ""].filter(Boolean).join(" · ");
}

/** The namespace that a sequence extends: that of its node if both have one adapter, else another of the adapter. */
export function namespaceOf(sequence, engine) {
  const { adapter, tenant } = sequence;
  const own = engine.namespaces[engine.nodes[sequence.node]?.namespace];
  if (own?.adapter === adapter) return own;
  const same = engine.namespaces.filter((each) => each.adapter === adapter);
  return same.find((each) => each.tenant === tenant) ?? same[0] ?? { adapter, tenant, salted: false };
}
