// Elements from data. Text only ever becomes text: there is no way here to make markup from a string.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "rect", "line", "title", "g", "path", "circle"]);
// Characters that reorder or hide what stands beside them, and those a terminal would obey.
const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}]/u;

export function h(tag, props = {}, ...children) {
  const element = SVG_TAGS.has(tag) && tag !== "title" ? document.createElementNS(SVG, tag)
    : tag === "svg:title" ? document.createElementNS(SVG, "title") : document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) {
      if (typeof value === "function") element.addEventListener(name.slice(2), value);
    } else if (name === "class") element.setAttribute("class", value);
    else if (name === "dataset") Object.assign(element.dataset, value);
    else if (name === "value" || name === "checked" || name === "selected" || name === "disabled") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

export function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

export function replace(element, ...children) {
  element.replaceChildren();
  return append(element, children);
}

// Model text as nodes: control and bidirectional characters are named instead of obeyed.
export function inert(text) {
  if (!CONTROL.test(text)) return [text];
  const nodes = [];
  let plain = "";
  for (const letter of text) {
    if (!CONTROL.test(letter)) { plain += letter; continue; }
    if (plain) nodes.push(plain);
    plain = "";
    const code = letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    nodes.push(h("span", { class: "control" }, `U+${code}`));
  }
  if (plain) nodes.push(plain);
  return nodes;
}

export function announce(text) {
  const region = document.getElementById("announcer");
  if (region) region.textContent = text;
}

// A number for reading: four significant digits, true minus, never "NaN".
export function num(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return grouped(value);
  const size = Math.abs(value);
  let text;
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) text = value.toExponential(2);
  else text = String(Number(value.toPrecision(digits)));
  return text.replaceAll("-", "−");
}

export function signed(value, digits = 4) {
  return value > 0 ? `+${num(value, digits)}` : num(value, digits);
}

export function percent(value) {
  return value === null || value === undefined ? "–" : `${num(100 * value, 3)} %`;
}

function grouped(value) {
  const text = String(Math.abs(value)).replace(/\B(?=(\d{3})+(?!\d))/g, "\u202f");
  return (value < 0 ? "−" : "") + text;
}

export function short(text, length = 12) {
  return text.length > length ? `${text.slice(0, length)}…` : text;
}
