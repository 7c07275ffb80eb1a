// One colour per namespace, constant while the page is open; the base model's is muted.

const HUES = 9;
const given = new Map();

/** CSS class with the colour of a namespace. */
export function hue({ adapter, tenant = "", salted = false }) {
  const name = JSON.stringify([adapter, tenant, salted]);
  if (!given.has(name)) {
    const plain = adapter === null && ![...given.values()].includes(0);
    given.set(name, plain ? 0 : 1 + ([...given.values()].filter((each) => each > 0).length % (HUES - 1)));
  }
  return `ns-${given.get(name)}`;
}

/** Display name of a namespace. */
export function title({ adapter, tenant = "", salted = false }) {
  return [adapter ?? "base model", tenant, salted ? "salted" : ""].filter(Boolean).join(" · ");
}

/** Namespace of a sequence: its node's if it has the same adapter, else another of the adapter. */
export function namespaceOf(sequence, engine) {
  const { adapter, tenant } = sequence;
  const own = engine.namespaces[engine.nodes[sequence.node]?.namespace];
  if (own?.adapter === adapter) return own;
  const same = engine.namespaces.filter((each) => each.adapter === adapter);
  return same.find((each) => each.tenant === tenant) ?? same[0] ?? { adapter, tenant, salted: false };
}
