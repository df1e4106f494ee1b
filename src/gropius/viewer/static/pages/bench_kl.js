// KL: three estimators as value and as gradient, on a small categorical policy that is dragged.
import { bench, latest } from "../api.js";
import { figure } from "../charts.js";
import { h, num, replace, signed } from "../dom.js";
import { t } from "../i18n.js";
import { failure, questions, slider, slideTo, table } from "./controls.js";

const LETTERS = "abcdefgh";
const NAMES = ["k1", "k2", "k3"];

export async function klBench(main, query, { remember }) {
  const s = { policy: read(query.get("policy")) || [5, 3, 2], reference: read(query.get("reference")) || [2, 2, 6] };
  if (s.policy.length !== s.reference.length) s.reference = s.policy.map(() => 1);
  const controls = h("div", { class: "controls" });
  const out = h("div", { class: "stage" });
  const ask = latest((body, signal) => bench("kl", body, signal));

  async function compute() {
    remember({ policy: s.policy.join(","), reference: s.reference.join(",") });
    try {
      const found = await ask(s);
      if (found) show(found);
    } catch (error) { failure(out, error); }
  }

  function drawControls() {
    const side = (name) => h("fieldset", {}, h("legend", {}, t(`kl.${name}`)), s[name].map((x, i) => slider(LETTERS[i], x, { min: 0.05, max: 10, step: 0.05 }, (v) => { s[name][i] = v; compute(); }, (v) => num(v / s[name].reduce((a, b) => a + b, v - s[name][i]), 3))));
    replace(controls, side("policy"), side("reference"), h("p", { class: "cases" }, h("button", { class: "button small", onclick: () => { s.policy = [...s.reference]; drawControls(); compute(); } }, t("kl.equal")), h("button", { class: "button small", onclick: () => { s.policy = [5, 3, 2]; s.reference = [2, 2, 6]; drawControls(); compute(); } }, t("reset")),
      h("button", { class: "button small", disabled: s.policy.length <= 2, onclick: () => { s.policy.pop(); s.reference.pop(); drawControls(); compute(); } }, t("kl.fewer")), h("button", { class: "button small", disabled: s.policy.length >= 8, onclick: () => { s.policy.push(1); s.reference.push(1); drawControls(); compute(); } }, t("kl.more"))));
  }

  function show(found) {
    for (const [side, name] of [[0, "policy"], [1, "reference"]]) {
      const sliders = controls.querySelectorAll("fieldset")[side].querySelectorAll(".slide");
      sliders.forEach((node, i) => slideTo(node, num(found[name][i], 3)));
    }
    const letters = found.policy.map((_, i) => LETTERS[i]);
    const bars = (lines, title, meaning) => figure({ title, meaning, x: t("kl.token"), categories: true, bars: true, height: 220, lines });
    const gradient = (list) => `(${list.map((x) => signed(Math.abs(x) < 1e-15 ? 0 : x, 3)).join(", ")})`;
    const same = (a, b) => a.every((x, i) => Math.abs(x - b[i]) < 1e-9);
    const whose = (g) => (same(g, found.true.reverse_gradient) ? t("kl.is_reverse") : same(g, found.true.forward_gradient) ? t("kl.is_forward") : g.every((x) => Math.abs(x) < 1e-9) ? t("kl.is_zero") : t("kl.is_other"));
    replace(out, h("div", { class: "multiples two" },
      bars([{ name: t("kl.policy"), x: letters, y: found.policy, colour: "accent" }, { name: t("kl.reference"), x: letters, y: found.reference, colour: "soft" }], t("kl.distributions"), ""),
      bars(NAMES.map((name, i) => ({ name, x: letters, y: found.estimators[name].values, colour: ["soft", "third", "accent"][i] })), t("kl.values"), t("kl.values.what"))),
      h("h2", {}, t("kl.value")), table(t("kl.value"), ["", t("kl.mean"), t("kl.std"), t("kl.least")], NAMES.map((name) => ({ cells: [name, num(found.estimators[name].mean, 5), num(found.estimators[name].std, 4), num(Math.min(...found.estimators[name].values), 4)] })).concat([{ class: "strong", cells: [t("kl.true_reverse"), num(found.true.reverse, 5), "", ""] }, { class: "strong", cells: [t("kl.true_forward"), num(found.true.forward, 5), "", ""] }])),
      h("h2", {}, t("kl.gradient")), table(t("kl.gradient"), ["", t("kl.logits"), t("kl.whose")], NAMES.map((name) => ({ cells: [name, gradient(found.estimators[name].gradient), whose(found.estimators[name].gradient)] })).concat([{ class: "strong", cells: [t("kl.true_reverse"), gradient(found.true.reverse_gradient), ""] }, { class: "strong", cells: [t("kl.true_forward"), gradient(found.true.forward_gradient), ""] }])),
      h("p", { class: "quiet" }, t("kl.moral")), questions(["k3", "kl_apart"]));
  }

  drawControls();
  replace(main, controls, out);
  compute();
  return {};
}

function read(text) {
  const values = (text || "").split(",").map(Number);
  return text && values.length >= 2 && values.length <= 8 && values.every((x) => x > 0) ? values : null;
}
