// Budget: group size against prompts for a mixture of pass rates, with the numbers of the plan.
import { bench, latest } from "../api.js";
import { figure } from "../charts.js";
import { h, num, percent, replace } from "../dom.js";
import { t } from "../i18n.js";
import { failure, field, numberInput, questions, slider, slideTo, table } from "./controls.js";

const START = () => ({ responses: 512, mixture: [{ weight: 0.7, rate: 0.05, concentration: 4 }, { weight: 0.3, rate: 0.7, concentration: 4 }] });

export async function budgetBench(main, query, { remember }) {
  let s = START();
  const given = query.get("mixture")?.split(";").map((part) => part.split(",").map(Number));
  if (given?.every((m) => m.length === 3 && m.every((x) => x > 0))) s = { responses: Number(query.get("responses")) || 512, mixture: given.map(([weight, rate, concentration]) => ({ weight, rate, concentration })) };
  const controls = h("div", { class: "controls" });
  const out = h("div", { class: "stage" });
  const ask = latest((body, signal) => bench("budget", body, signal));

  async function compute() {
    remember({ responses: s.responses, mixture: s.mixture.map((m) => [m.weight, m.rate, m.concentration].join(",")).join(";") });
    try {
      const found = await ask(s);
      if (found) show(found);
    } catch (error) { failure(out, error); }
  }

  function drawControls() {
    replace(controls, h("fieldset", {}, h("legend", {}, t("budget.mixture")), s.mixture.map((m, i) => h("div", { class: "component" }, h("strong", {}, `${i + 1}`),
      slider(t("budget.weight"), m.weight, { min: 0.01, max: 1 }, (x) => { m.weight = x; compute(); }, percent), slider(t("budget.rate"), m.rate, { min: 0.005, max: 0.995, step: 0.005 }, (x) => { m.rate = x; compute(); }, percent), slider(t("budget.concentration"), m.concentration, { min: 0.2, max: 60, step: 0.2 }, (x) => { m.concentration = x; compute(); }))),
      h("p", { class: "cases" }, field(t("budget.responses"), numberInput(s.responses, (x) => { s.responses = Math.round(x); compute(); }, { min: 4, max: 1000000, step: 1 })),
        h("button", { class: "button small", disabled: s.mixture.length <= 1, onclick: () => { s.mixture.pop(); drawControls(); compute(); } }, t("budget.fewer")), h("button", { class: "button small", disabled: s.mixture.length >= 4, onclick: () => { s.mixture.push({ weight: 0.3, rate: 0.5, concentration: 4 }); drawControls(); compute(); } }, t("budget.more")), h("button", { class: "button small", onclick: () => { s = START(); drawControls(); compute(); } }, t("reset")))));
  }

  function show(found) {
    const whole = s.mixture.reduce((sum, m) => sum + m.weight, 0);
    controls.querySelectorAll(".component").forEach((node, i) => slideTo(node.querySelector(".slide"), percent(s.mixture[i].weight / whole)));
    const sizes = found.rows.map((r) => String(r.group_size));
    const line = (name, pick, colour) => ({ name, x: sizes, y: found.rows.map(pick), colour, points: true });
    const best = found.recommended;
    replace(out, h("p", { class: "lede strong" }, t("budget.recommended", { size: best.group_size, prompts: best.prompts })),
      h("div", { class: "multiples two" },
        figure({ title: t("budget.dead"), meaning: t("budget.dead.what"), x: "G", categories: true, height: 220, lines: [line(t("queue.all_failed"), (r) => r.all_failed.value, "minus"), line(t("queue.all_solved"), (r) => r.all_solved.value, "accent")] }),
        figure({ title: t("budget.live"), meaning: t("budget.live.what"), x: "G", categories: true, height: 220, lines: [line(t("budget.live"), (r) => r.live_prompts.value, "accent")] })),
      table(t("bench.budget.title"), ["G", t("budget.prompts"), t("budget.dead"), t("queue.all_failed"), t("queue.all_solved"), t("budget.live"), t("budget.efficiency"), t("budget.refill")],
        found.rows.map((r) => ({ class: r.group_size === best.group_size ? "strong" : null, cells: [num(r.group_size), num(r.prompts), percent(r.dead.value), percent(r.all_failed.value), percent(r.all_solved.value), num(r.live_prompts.value, 3), percent(r.efficiency), r.refill_factor.value === null ? "∞" : `${num(r.refill_factor.value, 3)} ×`] }))),
      h("p", { class: "quiet" }, t("budget.note")), questions(["small_groups", "no_critic"]));
  }

  drawControls();
  replace(main, controls, out);
  compute();
  return {};
}
