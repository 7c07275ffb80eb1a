// DOM helpers. Text is never parsed as HTML: output of models and clients stays text.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** An element with a class and children: elements, or values that become text. */
export function el(name, className = "", ...children) {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** An SVG element with attributes. */
export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  set(element, attributes);
  element.append(...children);
  return element;
}

/** Set attributes that differ. */
export function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
  }
}

/** A table: heads with a class each, and rows of cells. */
export function table(heads, rows) {
  const cell = (name, content, kind) => el(name, kind, ...[content].flat());
  return el(
    "table",
    "",
    el("thead", "", el("tr", "", ...heads.map(([title, kind]) => cell("th", title, kind)))),
    el("tbody", "", ...rows.map((row) => el("tr", "", ...row.map((content, i) => cell("td", content, heads[i][1]))))),
  );
}
