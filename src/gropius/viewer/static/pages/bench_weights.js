// Token weights: the same answers under every aggregation, side by side.
import { bench, latest } from "../api.js";
import { h, num, percent, replace } from "../dom.js";
import { t } from "../i18n.js";
import { failure, field, numberInput, questions, table } from "./controls.js";

const KINDS = ["response_mean", "token_mean", "prompt_mean", "response_sum", "constant_length"];
const EXAMPLES = {
  three: { answers: [{ length: 1, loss: 2, prompt: 0 }, { length: 3, loss: 0, prompt: 0 }], constant: 4 },
  long: { answers: [{ length: 10, loss: 0.5, prompt: 0 }, { length: 100, loss: 0.5, prompt: 0 }], constant: 100 },
  prompts: { answers: [{ length: 20, loss: 1, prompt: 0 }, { length: 60, loss: 1, prompt: 0 }, { length: 10, loss: 1, prompt: 1 }, { length: 10, loss: 1, prompt: 1 }], constant: 60 },
};

export async function weightsBench(main, query, { remember }) {
  const copy = (name) => JSON.parse(JSON.stringify(EXAMPLES[name]));
  let s = copy("three");
  const given = query.get("answers")?.split(";").map((part) => part.split(",").map(Number));
  if (given?.every((a) => a.length === 3 && a.every(Number.isFinite))) s = { answers: given.map(([length, loss, prompt]) => ({ length, loss, prompt })), constant: Number(query.get("constant")) || 4 };
  const controls = h("div", { class: "controls" });
  const out = h("div", { class: "stage" });
  const ask = latest((body, signal) => bench("weights", body, signal));

  async function compute() {
    remember({ answers: s.answers.map((a) => [a.length, a.loss, a.prompt].join(",")).join(";"), constant: s.constant });
    try {
      const found = await ask({ lengths: s.answers.map((a) => a.length), losses: s.answers.map((a) => a.loss), prompts: s.answers.map((a) => a.prompt), constant: s.constant });
      if (found) show(found);
    } catch (error) { failure(out, error); }
  }

  function drawControls() {
    replace(controls, h("fieldset", {}, h("legend", {}, t("weights.answers")),
      h("div", { class: "answers" }, s.answers.map((a, i) => h("div", { class: "answer" }, h("strong", {}, `#${i + 1}`),
        field(t("weights.length"), numberInput(a.length, (x) => { a.length = Math.round(x); compute(); }, { min: 1, max: 4096, step: 1 })),
        field(t("weights.loss"), numberInput(a.loss, (x) => { a.loss = x; compute(); })),
        field(t("weights.prompt"), numberInput(a.prompt, (x) => { a.prompt = Math.round(x); compute(); }, { min: 0, step: 1 }))))),
      h("p", { class: "cases" }, h("button", { class: "button small", "aria-label": t("weights.fewer"), disabled: s.answers.length <= 1, onclick: () => { s.answers.pop(); drawControls(); compute(); } }, "−"), h("button", { class: "button small", "aria-label": t("weights.more"), disabled: s.answers.length >= 16, onclick: () => { s.answers.push({ length: 10, loss: 1, prompt: 0 }); drawControls(); compute(); } }, "+"),
        field(t("weights.constant"), numberInput(s.constant, (x) => { s.constant = Math.round(x); compute(); }, { min: 1, step: 1 })),
        h("span", { class: "quiet" }, t("group.cases")), Object.keys(EXAMPLES).map((name) => h("button", { class: "button small", onclick: () => { s = copy(name); drawControls(); compute(); } }, t(`weights.example.${name}`))))));
  }

  function show(found) {
    replace(out, table(t("bench.weights.title"), ["", t("weights.total"), ...s.answers.map((_, i) => t("weights.of", { i: i + 1 }))],
      KINDS.map((kind) => ({ cells: [[t(`aggregate.${kind}`), h("span", { class: "how" }, t(`aggregate.${kind}.formula`))], num(found.kinds[kind].loss), ...found.kinds[kind].answers.map((a) => [num(a.weight), h("span", { class: "how" }, t("weights.per_token", { value: num(a.per_token[0]), sum: num(a.sum) }))])] }))),
      h("h2", {}, t("weights.shares")), h("div", { class: "shares" }, KINDS.map((kind) => h("div", { class: "share" }, h("span", {}, t(`aggregate.${kind}`)), bar(found.kinds[kind].answers)))),
      h("p", { class: "quiet" }, t("weights.moral")), questions(["lengths", "removals"]));
  }

  function bar(answers) {
    let x = 0;
    const parts = answers.map((a, i) => { const node = h("rect", { x: 100 * x, y: 0, width: Math.max(100 * a.share - 0.4, 0.1), height: 10, class: `part k${i % 4}` }, h("svg:title", {}, `#${i + 1}: ${percent(a.share)}`)); x += a.share; return node; });
    return h("svg", { class: "stack", viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": answers.map((a, i) => `#${i + 1} ${percent(a.share)}`).join(", ") }, parts);
  }

  drawControls();
  replace(main, controls, out);
  compute();
  return {};
}
