// Several runs on one axis, and their objectives as a difference.
import { get, place } from "../api.js";
import { figure } from "../charts.js";
import { h, inert, replace } from "../dom.js";
import { t } from "../i18n.js";
import { trail } from "../shell.js";
import { flatten, PANELS } from "./run.js";

const COLOURS = ["accent", "third", "soft", "ink"];
const DASHES = ["solid", "dash", "dot", "dashdot"];

export async function comparePage(main, _, query) {
  const ids = (query.get("runs") || "").split(",").filter(Boolean).slice(0, 8);
  trail({ text: t("runs.title"), href: "/" }, { text: t("compare.title") });
  if (ids.length < 2) {
    replace(main, h("h1", {}, t("compare.title")), h("p", { class: "lede" }, t("compare.few")), h("p", {}, h("a", { class: "button", href: "/" }, t("runs.title"))));
    return {};
  }
  const runs = await Promise.all(ids.map(async (id) => ({ ...(await get(`runs/${encodeURIComponent(id)}`)), ...(await get(`runs/${encodeURIComponent(id)}/curves`)) })));
  const charts = PANELS.map(([title, list]) => [title, list.map(([key, lines]) => spec(key, lines[0][0], runs)).filter(Boolean)]).filter(([, list]) => list.length);
  replace(main, h("h1", {}, t("compare.title")), h("ul", { class: "where" }, runs.map((run, i) => h("li", {}, h("span", { class: `key k${i % 4}`, "aria-hidden": "true" }), h("a", { href: place.run(run.id) }, run.name)))),
    difference(runs, "objective", t("objective")), difference(runs, "recipe", t("recipe")),
    charts.map(([title, list]) => h("section", { class: "panel" }, h("h2", {}, t(title)), h("div", { class: "multiples" }, list.map(figure)))));
  return {};
}

function spec(key, metric, runs) {
  const lines = runs.map((run, i) => ({ name: run.name, x: run.series[metric]?.steps || [], y: run.series[metric]?.values || [], colour: COLOURS[i % 4], dash: DASHES[Math.floor(i / 4) % 4] })).filter((line) => line.x.length);
  return lines.length ? { title: t(`chart.${key}`), meaning: metric, x: t("step"), lines, legend: false } : null;
}

function difference(runs, part, title) {
  const tables = runs.map((run) => new Map(flatten(run[part] || {})));
  const keys = [...new Set(tables.flatMap((table) => [...table.keys()]))].filter((key) => new Set(tables.map((table) => table.get(key))).size > 1 && !/^(sha256|notes|derived)/.test(key));
  return h("section", { class: "panel" }, h("h2", {}, title),
    keys.length ? h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title }, h("table", { class: "data" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, t("compare.key")), runs.map((run) => h("th", { scope: "col" }, run.name)))),
      h("tbody", {}, keys.map((key) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, key)), tables.map((table) => h("td", {}, inert(table.get(key) ?? "–")))))))) : h("p", { class: "quiet" }, t("compare.same")));
}
