// Clip and ratio: surrogates and gradients as curves; and the four answers of two tokens, every number editable.
import { bench, latest } from "../api.js";
import { figure } from "../charts.js";
import { h, num, replace, signed } from "../dom.js";
import { t } from "../i18n.js";
import { choice, failure, field, numberInput, presetChoice, questions, slider, table } from "./controls.js";

const LEVELS = ["token", "sequence"];
const AGGREGATES = ["response_mean", "token_mean", "response_sum"];
const WORKED = () => ({ epsilon: 0.2, beta: 0.1, level: "token", aggregate: "response_mean", answers: [
  { advantage: 1, ratios: [1.1, 1.3], reference: [0.11, null] }, { advantage: 1, ratios: [0.9, 1.0], reference: [null, null] },
  { advantage: -1, ratios: [0.9, 0.7], reference: [null, null] }, { advantage: -1, ratios: [1.1, 1.3], reference: [null, null] }], anchor: 0.2 });

export async function ratioBench(main, query, { presets, remember }) {
  const usable = presets.filter((p) => p.objective.ratio.level !== "none");
  const s = { preset: usable.some((p) => p.name === query.get("preset")) ? query.get("preset") : "grpo", anchor: 0.2, high: 2, low: null, up: null };
  const controls = h("div", { class: "controls" });
  const plots = h("div", { class: "stage" });
  const worked = h("section", { class: "worked" });
  const ask = latest((body, signal) => bench("ratio", body, signal));

  async function curves() {
    remember({ preset: s.preset });
    const overrides = {};
    const kind = usable.find((p) => p.name === s.preset).objective.surrogate.kind;
    if (kind === "clip" || kind === "clip_masked" || kind === "log_clip") {
      if (s.low !== null) overrides["surrogate.low"] = s.low;
      if (s.up !== null) overrides["surrogate.high"] = s.up;
    }
    try {
      const found = await ask({ preset: s.preset, overrides, anchor: s.anchor, high: s.high });
      if (found) show(found);
    } catch (error) { failure(plots, error); }
  }

  function drawControls() {
    const axis = usable.find((p) => p.name === s.preset).objective.surrogate;
    const bounded = axis.kind === "clip" || axis.kind === "clip_masked" || axis.kind === "log_clip";
    replace(controls, h("fieldset", {}, h("legend", {}, t("ratio.surrogate")), h("div", { class: "grid" },
      field(t("preset"), presetChoice(usable, s.preset, (name) => { s.preset = name; s.low = s.up = null; drawControls(); curves(); })),
      bounded ? slider(t("ratio.low"), s.low ?? axis.low, { min: 0, max: 0.95, step: 0.01 }, (x) => { s.low = x; curves(); }) : null,
      bounded ? slider(t("ratio.high"), s.up ?? axis.high, { min: 0, max: 1, step: 0.01 }, (x) => { s.up = x; curves(); }) : null,
      slider(t("ratio.anchor"), s.anchor, { min: 0.01, max: 0.99 }, (x) => { s.anchor = x; curves(); }),
      field(t("ratio.axis"), choice([[2, "0 … 2"], [4, "0 … 4"], [10, "0 … 10"]], s.high, (v) => { s.high = Number(v); curves(); })))));
  }

  function show(found) {
    const line = (what) => [["positive", "accent"], ["negative", "minus"]].map(([sign, colour]) => ({ name: t(`ratio.${sign}`), x: found.ratio, y: found.curves[sign][what], colour }));
    const flat = ["positive", "negative"].map((sign) => t("ratio.flat", { sign: t(`ratio.${sign}`), where: spans(found.ratio, found.curves[sign].flat) }));
    replace(plots, h("p", { class: "formula small" }, found.formula.split("\n")[0]),
      h("div", { class: "multiples two" }, figure({ title: t("ratio.value"), meaning: t("ratio.value.what"), x: "r", showX: true, lines: line("value"), height: 260, marks: [{ x: 1 }] }), figure({ title: t("ratio.gradient"), meaning: t("ratio.gradient.what"), x: "r", showX: true, lines: line("gradient"), height: 260, marks: [{ x: 1 }] })),
      h("ul", { class: "where" }, flat.map((text) => h("li", {}, text))));
  }

  drawControls();
  replace(main, controls, plots, worked);
  curves();
  example(worked);
  return {};
}

function gradients(task, full) {
  return [signed(-task.gradient), h("span", { class: "how" }, t("worked.full", { value: signed(-full.gradient) }))];
}

function spans(xs, flags) {
  const out = [];
  let from = null;
  for (let i = 0; i <= xs.length; i++) {
    if (i < xs.length && flags[i]) from ??= xs[i];
    else if (from !== null) { out.push(`${num(from, 3)} … ${num(xs[i - 1], 3)}`); from = null; }
  }
  return out.join(", ") || t("nowhere");
}

function example(node) {
  let s = WORKED();
  const out = h("div", {});
  const inputs = h("div", {});
  const ask = latest((answers, full, task, signal) => Promise.all([full, task].map((overrides) => bench("batch", { answers, preset: "grpo", overrides }, signal))));

  async function compute() {
    const answers = s.answers.map((a) => ({ advantage: a.advantage, ratios: a.ratios, anchor: s.anchor, reference: a.ratios.map((r, i) => a.reference[i] ?? r * s.anchor) }));
    const shared = { "surrogate.low": s.epsilon, "surrogate.high": s.epsilon, "ratio.level": s.level, "aggregate.kind": s.aggregate };
    const none = { ...shared, "kl.estimator": "none", "kl.coefficient": 0 };
    try {
      const both = await ask(answers, s.beta ? { ...shared, "kl.coefficient": s.beta } : none, none);
      if (both) show(...both);
    } catch (error) { failure(out, error); }
  }

  function draw() {
    replace(inputs, h("div", { class: "grid" }, field("ε", numberInput(s.epsilon, (x) => { s.epsilon = x; compute(); }, { min: 0, step: 0.01 })), field("β", numberInput(s.beta, (x) => { s.beta = x; compute(); }, { min: 0, step: 0.01 })), field(t("worked.anchor"), numberInput(s.anchor, (x) => { s.anchor = x; compute(); }, { min: 0.001, max: 1, step: 0.01 })), 
      field(t("worked.level"), choice(LEVELS.map((name) => [name, t(`worked.level.${name}`)]), s.level, (v) => { s.level = v; compute(); })), field(t("worked.aggregate"), choice(AGGREGATES.map((name) => [name, t(`aggregate.${name}`)]), s.aggregate, (v) => { s.aggregate = v; compute(); })),
      h("button", { class: "button small", onclick: () => { s = WORKED(); draw(); compute(); } }, t("reset")), h("button", { class: "button small", onclick: () => { s.answers[0] = { advantage: 1, ratios: [4, 0.25], reference: [null, null] }; s.level = "sequence"; draw(); compute(); } }, t("worked.sequence")), h("button", { class: "button small", onclick: () => { for (const a of s.answers) a.ratios = [1, 1]; draw(); compute(); } }, t("worked.ones"))),
      table(t("worked.title"), ["", "A", t("worked.ratio", { i: 1 }), t("worked.ratio", { i: 2 }), t("worked.reference", { i: 1 }), t("worked.reference", { i: 2 })], s.answers.map((a, i) => ({ cells: [t("worked.answer", { i: i + 1 }),
        numberInput(a.advantage, (x) => { a.advantage = x; compute(); }, { label: `A ${i + 1}` }),
        ...[0, 1].map((j) => numberInput(a.ratios[j], (x) => { a.ratios[j] = x; compute(); }, { min: 0.001, step: 0.1, label: t("worked.ratio_of", { i: i + 1, j: j + 1 }) })),
        ...[0, 1].map((j) => numberInput(a.reference[j] ?? "", (x) => { a.reference[j] = x; compute(); }, { min: 0.0001, max: 1, step: 0.01, label: t("worked.reference_of", { i: i + 1, j: j + 1 }) }))] }))));
  }

  function show(found, task) {
    const rows = found.groups[0].responses.map((r, i) => ({ cells: [t("worked.answer", { i: i + 1 }), ...r.tokens.flatMap((token, j) => [[signed(token.surrogate), token.clipped ? h("span", { class: "flag" }, t("worked.clipped")) : null, s.beta && token.kl ? h("span", { class: "how" }, t("worked.full", { value: signed(token.surrogate - s.beta * token.kl, 7) })) : null], num(token.kl), gradients(task.groups[0].responses[i].tokens[j], token)]), signed((r.tokens[0].surrogate + r.tokens[1].surrogate) / 2)] }));
    replace(out, table(t("worked.title"), ["", ...[1, 2].flatMap((i) => [t("worked.term", { i }), t("worked.kl", { i }), t("worked.gradient", { i })]), t("worked.mean")], rows),
      h("dl", { class: "pairs results" }, h("dt", {}, t("worked.task")), h("dd", { id: "worked-task" }, num(-task.loss, 6)), h("dt", {}, t("worked.objective")), h("dd", { id: "worked-objective" }, num(-found.loss, 6)), h("dt", {}, t("worked.loss")), h("dd", {}, num(found.loss, 6)), h("dt", {}, t("worked.clip_fraction")), h("dd", {}, num(found.metrics.clip_fraction))),
      h("p", { class: "quiet" }, t("worked.note")), questions(["broadcast", "clip", "sequence", "round", "roles"]));
  }

  replace(node, h("h2", {}, t("worked.title")), h("p", { class: "quiet" }, t("worked.lede")), inputs, out);
  draw();
  compute();
}
