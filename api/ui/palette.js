// One colour per namespace, the same as long as it is drawn; the base model's is muted.

const HUES = 9;
const given = new Map(); // the name drawn last is last

/** CSS class with the colour of a namespace. */
export function hue({ adapter, tenant = "", salted = false }) {
  const name = JSON.stringify([adapter, tenant, salted]);
  const plain = adapter === null && ![...given.values()].includes(0);
  const number = given.get(name) ?? (plain ? 0 : free());
  given.delete(name);
  given.set(name, number);
  return `ns-${number}`;
}

/** A colour that no name has, or the one whose names have not been drawn for longest. */
function free() {
  const last = new Map([...given.values()].map((number, at) => [number, at]));
  const numbers = Array.from({ length: HUES - 1 }, (_, at) => at + 1);
  return numbers.reduce((best, each) => ((last.get(each) ?? -1) < (last.get(best) ?? -1) ? each : best));
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
