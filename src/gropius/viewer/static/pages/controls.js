// Small labelled controls that the benches share.
import { h, num, replace } from "../dom.js";
import { t } from "../i18n.js";

export function field(label, control, note = null) {
  return h("label", { class: "field" }, h("span", {}, label), control, note);
}

export function numberInput(value, onchange, { min, max, step = "any", label, width } = {}) {
  return h("input", { type: "number", value, min, max, step, "aria-label": label, class: width || "short", oninput: (event) => { const x = event.target.valueAsNumber; if (Number.isFinite(x)) onchange(x); } });
}

export function choice(options, value, onchange, label) {
  return h("select", { "aria-label": label, onchange: (event) => onchange(event.target.value) }, options.map(([name, text]) => h("option", { value: name, selected: String(name) === String(value) }, text)));
}

export function slider(label, value, { min, max, step = 0.01 }, onchange, show = (x) => num(x, 3)) {
  const node = h("label", { class: "field slide" }, h("span", {}, label), h("input", { type: "range", min, max, step, value, oninput: (event) => { slideTo(node, show(event.target.valueAsNumber)); onchange(event.target.valueAsNumber); } }), h("output", { class: "figure" }));
  slideTo(node, show(value));
  return node;
}

// What a slider says of itself, to the eye and to a screen reader; a share changes when another slider moves.
export function slideTo(node, text) {
  replace(node.querySelector("output"), text);
  node.querySelector("input").setAttribute("aria-valuetext", text);
}

export function tick(label, checked, onchange) {
  return h("label", { class: "tick" }, h("input", { type: "checkbox", checked, onchange: (event) => onchange(event.target.checked) }), h("span", {}, label));
}

export function presetChoice(presets, value, onchange) {
  return choice(presets.map((p) => [p.name, p.name]), value, onchange, t("preset"));
}

export function failure(node, error) {
  replace(node, h("p", { class: "problem", role: "alert" }, error.message));
}

export function table(label, head, rows) {
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, h("table", { class: "data" },
    h("thead", {}, h("tr", {}, head.map((cell, i) => (cell === "" ? h("td", {}) : h("th", { scope: "col", class: i ? "figure" : null }, cell))))),
    h("tbody", {}, rows.map((row) => h("tr", { class: row.class }, row.cells.map((cell, i) => (i === 0 ? h("th", { scope: "row" }, cell) : h("td", { class: `figure ${cell?.tone || ""}` }, cell && cell.tone !== undefined ? cell.text : cell))))))));
}

// Questions that check understanding; each opens on its answer, with the reason.
export function questions(keys) {
  return h("section", { class: "questions" }, h("h2", {}, t("questions")), keys.map((key) => h("details", {}, h("summary", {}, t(`question.${key}`)), h("p", {}, t(`question.${key}.answer`)))));
}
