// A group, step by step: rewards → baseline → centred → scale → advantage, forward and back, guessed first if wished.
import { bench, latest } from "../api.js";
import { announce, h, num, replace, signed } from "../dom.js";
import { t } from "../i18n.js";
import { choice, failure, field, numberInput, presetChoice, questions, tick } from "./controls.js";
import { scaleWords } from "./group.js";
import { strip } from "./strip.js";

const CASES = [["1,1,0,0"], ["1,0,0,0"], ["1,1,1,0"], ["1,2,3"], ["0,0,0,0"], ["1,1,1,1"], ["0.5,0.5"], ["1"]];
const LAST = 9;
const BASELINES = ["group_mean", "leave_one_out", "none"];
const SCALES = ["group_std", "none", "group_mean"];
const ASKED = ["one_task", "unscaled", "epsilon", "loo", "fit", "batch", "identical"];

export async function groupBench(main, query, { presets, remember }) {
  const start = { preset: query.get("preset") || "grpo", rewards: read(query.get("rewards")) || [1, 1, 0, 0] };
  const s = { ...start, at: Number(query.get("at") ?? LAST), guess: query.get("guess") === "1", switches: true, overrides: fromQuery(query), guessed: {} };
  if (!presets.some((p) => p.name === s.preset)) s.preset = "grpo";
  const controls = h("div", { class: "controls" });
  const stage = h("div", { class: "stage" });
  const ask = latest((body, signal) => bench("group", body, signal));
  let found = null;
  const last = () => found.steps.length - 1;

  async function compute() {
    remember({ rewards: s.rewards.join(","), preset: s.preset, at: s.at, ...(s.guess ? { guess: 1 } : {}), ...s.overrides });
    try {
      const answer = await ask({ rewards: s.rewards, preset: s.preset, overrides: s.overrides });
      if (!answer) return;
      found = answer;
      s.at = Math.max(0, Math.min(last(), s.at));
      show();
    } catch (error) { failure(stage, error); }
  }

  function drawControls() {
    const axis = presets.find((p) => p.name === s.preset).objective.advantage;
    const own = (key) => s.overrides[`advantage.${key}`] ?? axis[key];
    const set = (key, value) => { s.overrides[`advantage.${key}`] = value; compute(); };
    replace(controls,
      h("fieldset", {}, h("legend", {}, t("group.rewards")), h("div", { class: "rewards" }, s.rewards.map((reward, i) => h("div", { class: "reward-cell" },
        s.switches && (reward === 0 || reward === 1) ? h("button", { class: `switch ${reward ? "right" : "wrong"}`, onclick: () => { s.rewards[i] = reward ? 0 : 1; refresh(controls, i); } }, h("span", { class: "unseen" }, t("group.answer", { i: i + 1 })), reward ? t("right") : t("wrong")) : null,
        numberInput(reward, (x) => { s.rewards[i] = x; compute(); }, { label: t("group.reward_of", { i: i + 1 }) }))),
        h("div", { class: "size" }, h("button", { class: "button small", "aria-label": t("group.fewer"), disabled: s.rewards.length <= 1, onclick: () => { s.rewards.pop(); refresh(); } }, "−"), h("span", {}, `G = ${s.rewards.length}`), h("button", { class: "button small", "aria-label": t("group.more"), disabled: s.rewards.length >= 64, onclick: () => { s.rewards.push(0); refresh(); } }, "+"))),
        h("p", { class: "cases" }, h("span", { class: "quiet" }, t("group.cases")), CASES.map(([text]) => h("button", { class: "button small", onclick: () => { s.rewards = read(text); refresh(); } }, text.replaceAll(",", " "))))),
      h("fieldset", {}, h("legend", {}, t("group.definition")), h("div", { class: "grid" },
        field(t("preset"), presetChoice(presets, s.preset, (name) => { s.preset = name; s.overrides = {}; refresh(); })),
        field(t("replay.baseline"), choice(BASELINES.concat(BASELINES.includes(own("baseline")) ? [] : [own("baseline")]).map((b) => [b, t(`baseline.${b}.name`)]), own("baseline"), (v) => set("baseline", v))),
        field(t("replay.scale"), choice(SCALES.concat(SCALES.includes(own("scale")) ? [] : [own("scale")]).map((b) => [b, t(`scale.${b}.name`)]), own("scale"), (v) => set("scale", v))),
        field("ddof", choice([[0, t("ddof.0")], [1, t("ddof.1")]], own("ddof"), (v) => set("ddof", Number(v)))),
        field("ε", numberInput(own("epsilon"), (v) => set("epsilon", v), { min: 0, step: 0.0001 }))),
        h("p", { class: "cases" }, tick(t("group.guess"), s.guess, (on) => { s.guess = on; s.guessed = {}; if (on) s.at = 0; compute(); }), h("button", { class: "button small", onclick: () => { Object.assign(s, { ...start, rewards: [1, 1, 0, 0], preset: "grpo", at: LAST, overrides: {}, guessed: {}, guess: false }); refresh(); } }, t("reset")))));
  }

  function refresh(from, at) {
    drawControls();
    if (from) controls.querySelectorAll(".switch")[at]?.focus();
    compute();
  }

  function show() {
    const play = h("div", { class: "play", role: "group", "aria-label": t("group.steps") },
      h("button", { class: "button", disabled: s.at === 0, onclick: () => step(-1), id: "back" }, t("back")),
      h("ol", { class: "steps" }, found.steps.map(({ name }, i) => h("li", {}, h("button", { class: "step", "aria-current": i === s.at ? "step" : null, onclick: () => { s.at = i; compute(); } }, t(`replay.${name}`))))),
      h("button", { class: "button", disabled: s.at === last(), onclick: () => step(1), id: "forward" }, t("forward")));
    const waits = s.guess && s.at > 0 && !(s.at in s.guessed) ? s.at : null;
    const shown = found.steps.slice(0, waits === null ? s.at + 1 : s.at);
    replace(stage, play, waits === null ? null : question(waits), answerOf(), matrix(shown), meaning(waits), questions(ASKED));
  }

  function step(by) {
    const id = by > 0 ? "forward" : "back";
    s.at = Math.max(0, Math.min(last(), s.at + by));
    compute().then(() => {
      document.getElementById(id)?.focus();
      const row = found.steps[s.at];
      if (!s.guess || s.at in s.guessed) announce(`${t(`replay.${row.name}`)}: ${row.values.map((value) => num(value)).join(", ")}`);
    });
  }

  function question(at) {
    const input = h("input", { type: "number", step: "any", class: "short", id: "guess" });
    return h("form", { class: "guess", onsubmit: (event) => { event.preventDefault(); s.guessed[at] = input.valueAsNumber; compute(); } },
      h("label", { for: "guess" }, t("group.guess.ask", { what: t(`replay.${found.steps[at].name}`) })), input, h("button", { class: "button" }, t("group.guess.show")));
  }

  function answerOf() {
    if (!s.guess || !(s.at in s.guessed)) return null;
    const real = found.steps[s.at].values[0];
    const mine = s.guessed[s.at];
    const near = Math.abs(real - mine) <= 0.005 * Math.max(1, Math.abs(real));
    const text = Number.isFinite(mine) ? t(near ? "group.guess.right" : "group.guess.wrong", { mine: num(mine), real: num(real) }) : t("group.guess.none", { real: num(real) });
    announce(text);
    return h("p", { class: near ? "good" : "warning" }, text);
  }

  function matrix(steps) {
    const words = { rewards: "R", baseline: t(`baseline.${found.objective.advantage.baseline}`), centred: "R − b", scale: scaleWords(found.objective.advantage), advantage: advantageWords(found.objective) };
    return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": t("replay.title") }, h("table", { class: "data replay" },
      h("thead", {}, h("tr", {}, h("td", {}), s.rewards.map((_, i) => h("th", { scope: "col", class: "figure" }, `#${i + 1}`)))),
      h("tbody", {}, steps.map((row) => h("tr", { class: row.name === "advantage" ? "strong" : null }, h("th", { scope: "row" }, t(`replay.${row.name}`), h("span", { class: "how" }, words[row.name] ?? t("transformed.words", { k: found.objective.advantage.k }))),
        row.values.map((value) => h("td", { class: `figure ${tone(row.name, value)}` }, tone(row.name, value) === null ? num(value) : signed(value))))))));
  }

  function meaning(waits) {
    if (waits !== null || s.at < last()) return h("p", { class: "quiet" }, t(`group.step.${found.steps[waits ?? s.at].name}`));
    const kl = found.objective.kl;
    return h("div", { class: "meaning" }, h("p", { class: "verdict-line" }, strip(s.rewards, found.advantages, { low: Math.min(0, ...s.rewards), high: Math.max(1, ...s.rewards), height: 34, width: 14 }), h("span", {}, t(`diagnosis.${found.state}`))),
      h("p", { class: "quiet" }, found.state === "informative" ? [t("group.below"), " ", rarer()] : kl.estimator !== "none" && kl.place === "loss" ? t("group.kl_still", { beta: num(kl.coefficient) }) : null),
      h("p", { class: "formula small" }, found.formula.split("\n")[1]), found.notes.map((note) => h("p", { class: "quiet" }, note)));
  }

  // Right or wrong, scaled by the population std: the advantages follow from the share that is right.
  function rarer() {
    const axis = found.objective.advantage;
    const plain = axis.baseline === "group_mean" && axis.scale === "group_std" && axis.ddof === 0 && axis.epsilon === 0 && found.steps.length === 5;
    if (!plain || s.rewards.some((r) => r !== 0 && r !== 1)) return null;
    const p = found.mean;
    return t("group.rarer", { p: num(p), right: num(Math.sqrt((1 - p) / p)), wrong: num(-Math.sqrt(p / (1 - p))) });
  }

  drawControls();
  replace(main, controls, stage);
  compute();
  return {};
}

function tone(name, value) {
  if (name !== "centred" && name !== "advantage") return null;
  return value > 0 ? "plus" : value < 0 ? "minus" : "";
}

function advantageWords(objective) {
  const axis = objective.advantage;
  return axis.whiten === "none" ? t("advantage.words") : t("advantage.whitened");
}

function read(text) {
  const values = (text || "").split(",").map(Number);
  return text && values.every(Number.isFinite) && values.length <= 64 ? values : null;
}

function fromQuery(query) {
  const out = {};
  for (const key of ["baseline", "scale", "ddof", "epsilon"]) {
    const value = query.get(`advantage.${key}`);
    if (value !== null) out[`advantage.${key}`] = key === "ddof" || key === "epsilon" ? Number(value) : value;
  }
  return out;
}
