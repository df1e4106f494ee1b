// One run: what it optimises, its curves with their intervals, what the doctor found, live.
import { get, place } from "../api.js";
import { figure, update } from "../charts.js";
import { announce, h, inert, num, percent, replace } from "../dom.js";
import { has, t } from "../i18n.js";
import { notes, problem, problems, trail } from "../shell.js";

// Each panel: a title and its charts; a chart: [name of the title, [[metric, colour, dash?]…], options].
export const PANELS = [
  ["panel.outcome", [
    ["reward", [["reward", "accent"]], { interval: "reward" }],
    ["held_out", [["held_out/mean", "accent"]], { interval: "held_out", points: true, zero: true }],
    ["raw", [["raw", "accent"]], {}],
    ["reward_std", [["reward_std", "accent"]], {}]]],
  ["panel.groups", [
    ["dead", [["groups/all_failed", "minus"], ["groups/all_solved", "accent"]], { zero: true }],
    ["informative", [["groups/informative", "accent"]], { zero: true }],
    ["effective_groups", [["effective_groups", "accent"]], { zero: true }],
    ["duplicates", [["duplicates", "accent"]], { zero: true }],
    ["void", [["void_rate", "minus"], ["rejected_rate", "accent"]], { zero: true }]]],
  ["panel.policy", [
    ["entropy", [["entropy", "accent"]], {}],
    ["kl", [["kl", "accent"]], {}],
    ["clip", [["clip_ratio/low_mean", "minus"], ["clip_ratio/high_mean", "accent"]], { zero: true }],
    ["mismatch", [["sampling/sampling_logp_difference/mean", "accent"]], {}],
    ["grad_norm", [["grad_norm", "accent"]], {}],
    ["loss", [["loss", "accent"]], {}],
    ["learning_rate", [["learning_rate", "accent"]], {}]]],
  ["panel.length", [
    ["length", [["completions/mean_length", "accent"], ["completions/max_length", "soft", "dot"]], {}],
    ["truncated", [["completions/clipped_ratio", "minus"]], { zero: true }]]],
  ["panel.budget", [
    ["speed", [["tokens_per_s", "accent"]], { zero: true }],
    ["tokens", [["tokens_sampled", "accent"], ["tokens_trained", "soft", "dot"]], { zero: true }],
    ["skipped", [["skipped_compute", "accent"]], { zero: true }],
    ["step_time", [["step_time", "accent"]], { zero: true }]]],
];
const DRAWN = new Set(PANELS.flatMap(([, charts]) => charts.flatMap(([, lines]) => lines.map(([name]) => name))));

export async function runPage(main, [id]) {
  const [run, curves] = await Promise.all([get(`runs/${encodeURIComponent(id)}`), get(`runs/${encodeURIComponent(id)}/curves`)]);
  trail({ text: t("runs.title"), href: "/" }, { text: run.name });
  const status = h("p", { class: "status" });
  const figures = new Map();
  let marks = marksOf(run.findings);
  const body = h("div", { class: "panels" });
  const state = { run, curves };
  const said = h("div", {});
  const sayStatus = () => {
    replace(said, problems(state.run.problems), notes(state.run));
    replace(status, condition(state.run),
      h("span", {}, state.run.asked_steps ? t("run.steps", { done: num(state.run.steps), of: num(state.run.asked_steps) }) : t("run.steps_done", { done: num(state.run.steps) })),
      state.run.rollout_steps.length ? h("a", { href: place.groups(id, { step: state.run.rollout_steps.at(-1) }) }, t("run.groups")) : h("span", { class: "quiet" }, t("run.no_rollouts")));
  };
  const found = h("div", {});
  const drawFindings = () => replace(found, findings(state.run, id, (list) => { marks = marksOf(list); drawPanels(body, figures, state.curves.series, marks, id); }));
  sayStatus();
  drawFindings();
  drawPanels(body, figures, state.curves.series, marks, id);
  replace(main, h("div", { class: "headline" }, h("h1", {}, run.name), status), said,
    found, objective(run), body, recipe(run));
  const timer = setInterval(async () => {
    if (document.hidden) return;
    const now = await get(`runs/${encodeURIComponent(id)}/state`).catch(() => null);
    if (!now || (now.revision === state.curves.revision && state.curves.indexed)) return;
    const moved = now.revision !== state.curves.revision;
    const before = JSON.stringify(state.run.findings);
    [state.run, state.curves] = await Promise.all([get(`runs/${encodeURIComponent(id)}`), get(`runs/${encodeURIComponent(id)}/curves`)]);
    sayStatus();
    if (JSON.stringify(state.run.findings) !== before) { marks = marksOf(state.run.findings); drawFindings(); }
    drawPanels(body, figures, state.curves.series, marks, id);
    if (moved) announce(t("run.updated", { step: state.run.steps }));
  }, 2000);
  return { leave: () => clearInterval(timer) };
}

// Being written, another trainer's, ended where it was to end, or before.
function condition(run) {
  if (run.live) return h("span", { class: "live" }, t("run.live"));
  if (run.imported) return h("span", { class: "quiet" }, t("run.imported", { from: run.imported }));
  return h("span", { class: "quiet" }, t(run.asked_steps && run.steps < run.asked_steps ? "run.stopped" : "run.finished"));
}

// Roots only: a mark for everything that follows from one would hide it.
function marksOf(list) {
  return list.filter((f) => Number.isInteger(f.step) && !f.explained_by).map((f) => ({ x: f.step, text: String(f.name || ""), colour: "warn" }));
}

function drawPanels(body, figures, series, marks, id) {
  const parts = series => PANELS.map(([title, charts]) => [title, charts.map((chart) => spec(chart, series, marks)).filter(Boolean)]).filter(([, specs]) => specs.length);
  const wanted = parts(series);
  const rest = Object.keys(series).filter((name) => name.startsWith("rewards/") && name.endsWith("/mean") && !DRAWN.has(name));
  if (rest.length > 1) wanted.splice(1, 0, ["panel.parts", rest.map((name) => partSpec(name, series, marks))]);
  const keys = wanted.flatMap(([, specs]) => specs.map((s) => s.key)).join();
  if (body.dataset.keys === keys) {
    for (const s of wanted.flatMap(([, specs]) => specs)) update(figures.get(s.key), s);
    return;
  }
  body.dataset.keys = keys;
  replace(body, wanted.map(([title, specs]) => h("section", { class: "panel", "aria-label": t(title) }, h("h2", {}, t(title)),
    h("div", { class: "multiples" }, specs.map((s) => { const node = figure(s); figures.set(s.key, node); return node; })))));
}

function spec([key, lines, options], series, marks) {
  const found = lines.filter(([name]) => series[name]?.values.length);
  if (!found.length) return null;
  const only = found.length === 1 ? series[found[0][0]] : null;
  return {
    key, title: t(`chart.${key}`), meaning: meaning(key, only), x: t("step"), latest: only?.values.at(-1), marks,
    range: undefined, lines: found.map(([name, colour, dash]) => ({
      name: label(name), x: series[name].steps, y: series[name].values, colour, dash, points: options.points,
      ...interval(options.interval, series, series[name]),
    })),
  };
}

function partSpec(name, series, marks) {
  const part = name.slice("rewards/".length, -"/mean".length);
  return { key: name, title: part, x: t("step"), latest: series[name].values.at(-1), marks, lines: [{ name: part, x: series[name].steps, y: series[name].values }] };
}

function interval(kind, series, main) {
  const [low, high] = kind === "held_out" ? [series["held_out/mean_low"], series["held_out/mean_high"]]
    : kind === "reward" ? [series["reward/low"], series["reward/high"]] : [];
  if (!low || low.steps.length !== main.steps.length) return {};
  return { low: low.values, high: high.values };
}

function meaning(key, only) {
  if (has(`meaning.${key}`)) return t(`meaning.${key}`);
  if (!only || only.unit === "1") return "";
  const known = `unit.${only.unit.replaceAll(" ", "_")}`;
  return has(known) ? t(known) : only.unit;
}

function label(name) {
  return has(`metric.${name}`) ? t(`metric.${name}`) : name;
}

function findings(run, id, found) {
  const body = h("div", {});
  const section = h("section", { class: "findings", "aria-label": t("findings") }, h("h2", {}, t("findings")), body);
  const show = (list, examined) => replace(body, list.length ? h("ul", {}, list.map((f) => one(f, id))) : h("p", { class: "quiet" }, examined ? t("findings.nothing") : examine()));
  const examine = () => h("button", { class: "button small", onclick: async (event) => {
    event.target.disabled = true;
    replace(event.target, t("findings.busy"));
    const answer = await get(`runs/${encodeURIComponent(id)}/examine`).catch((error) => ({ error }));
    if (answer.error) { replace(body, problem(answer.error.message)); return; }
    show(answer.findings, true);
    found(answer.findings);
  } }, t("findings.examine"));
  if (!run.findings.length && !run.rollout_steps.length) return null;
  show(run.findings, false);
  return section;
}

function one(finding, id) {
  const text = (name) => (finding[name] ? inert(String(finding[name])) : null);
  const fix = [finding.key, finding.change].filter(Boolean).map(String).join(": ");
  return h("li", { class: `finding ${finding.severity === "critical" ? "grave" : finding.severity === "note" || finding.explained_by ? "slight" : ""}` },
    h("strong", {}, text("name")), " ", Number.isInteger(finding.step) ? h("span", { class: "quiet" }, `${t("at_step", { step: finding.step })} `) : null,
    finding.explained_by ? h("span", { class: "quiet" }, t("findings.explained", { root: finding.explained_by })) : null,
    h("p", {}, text("message")), finding.cause ? h("p", { class: "quiet" }, inert(t("findings.cause", { cause: finding.cause }))) : null,
    fix ? h("p", { class: "quiet" }, inert(fix)) : null, h("span", { class: "evidence" }, evidence(finding, id)));
}

function evidence(finding, id) {
  const rows = Array.isArray(finding.evidence) ? finding.evidence : [];
  return rows.filter((row) => row && Number.isInteger(row.step)).slice(0, 8).map((row) => row.group_id
    ? h("a", { href: place.group(id, row.step, row.group_id) }, row.group_id)
    : h("a", { href: place.groups(id, { step: row.step }) }, t("at_step", { step: row.step })));
}

export function objective(run) {
  if (!run.formula) return h("section", { class: "objective", "aria-label": t("objective") }, h("h2", {}, t("objective")), h("p", { class: "quiet" }, t("objective.none")));
  const [first, ...rest] = run.formula.split("\n");
  return h("section", { class: "objective", "aria-label": t("objective") },
    h("h2", {}, t("objective"), run.preset ? h("span", { class: "quiet" }, ` ${run.preset}`) : null),
    h("p", { class: "formula" }, first), h("ul", { class: "where" }, rest.map((line) => h("li", {}, line))));
}

function recipe(run) {
  const rows = flatten(run.recipe);
  if (!rows.length) return null;
  return h("details", { class: "recipe" }, h("summary", {}, t("recipe")), h("dl", { class: "pairs" },
    rows.map(([key, value]) => [h("dt", {}, key), h("dd", {}, inert(value))])));
}

export function flatten(value, prefix = "") {
  if (value === null || typeof value !== "object") return [[prefix, value === null ? "–" : String(value)]];
  if (Array.isArray(value)) {
    if (value.every((item) => item === null || typeof item !== "object")) return [[prefix, value.join(", ")]];
    return value.flatMap((item, i) => flatten(item, `${prefix}[${i}]`));
  }
  return Object.entries(value).flatMap(([key, item]) => flatten(item, prefix ? `${prefix}.${key}` : key));
}

export { percent };
