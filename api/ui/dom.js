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

/** Set attributes that differ; returns the element. */
export function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
  }
  return element;
}

/** Show a text; nothing is announced again that stands there already. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Make these the children of an element, and keep those that are alike: what the pointer or a selection is on stays.
 * Attributes and children of kept elements follow the new ones; they have no listeners.
 */
export function update(element, ...children) {
  const old = [...element.childNodes];
  const made = children.map((child) => (child instanceof Node ? child : document.createTextNode(child)));
  made.forEach((child, i) => {
    const kept = old[i];
    if (!kept) element.append(child);
    else if (kept.nodeName !== child.nodeName) kept.replaceWith(child);
    else if (kept instanceof Text) kept.data = child.data;
    else follow(kept, child);
  });
  old.slice(made.length).forEach((gone) => gone.remove());
}

function follow(kept, made) {
  if (kept.isEqualNode(made)) return;
  for (const { name } of [...kept.attributes]) if (!made.hasAttribute(name)) kept.removeAttribute(name);
  for (const { name, value } of made.attributes) if (name !== "style") set(kept, { [name]: value });
  kept.style.cssText = made.style.cssText; // The attribute is not allowed by the page's policy.
  update(kept, ...made.childNodes);
}

/**
 * A table: heads with classes each, and rows of cells.
 *
 * In a narrow panel panels.css folds a row: cells of the class "lead" come first, and all others follow, each behind its
 * head. Roles keep it a table for screen readers, as CSS that changes the layout of rows takes that away.
 */
export function table(heads, rows) {
  const part = (name, role, children, kind = "") => set(el(name, kind, ...children), { role });
  const head = ([title, kind]) => set(part("th", "columnheader", [title], kind), { scope: "col" });
  const cell = (content, i) => set(part("td", "cell", [content].flat(), heads[i][1]), { "data-head": heads[i][0] });
  const row = (cells) => part("tr", "row", cells);
  return part("table", "table", [
    part("thead", "rowgroup", [row(heads.map(head))]),
    part("tbody", "rowgroup", rows.map((each) => row(each.map(cell)))),
  ]);
}
