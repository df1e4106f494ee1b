// What stands around every page: the bar, the way back up, language, theme, help, and keys.
import { h, inert, replace } from "./dom.js";
import { language, setLanguage, t } from "./i18n.js";

export function theme() {
  try { return localStorage.getItem("theme") || "system"; } catch { return "system"; }
}

export function applyTheme(name = theme()) {
  const dark = name === "dark" || (name === "system" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
}

function setTheme(name) {
  try { localStorage.setItem("theme", name); } catch { /* storage is off */ }
  applyTheme(name);
}

export function frame(changed) {
  const trail = h("nav", { id: "trail", "aria-label": t("nav.trail") });
  const tools = h("div", { class: "tools" },
    h("a", { href: "/bench/group", class: "tool" }, t("nav.bench")),
    h("button", { class: "tool", onclick: () => { setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"); changed("theme"); }, "aria-label": t("nav.theme"), title: t("nav.theme") }, "◐"),
    h("button", { class: "tool", onclick: () => { setLanguage(language() === "en" ? "zh" : "en"); changed("language"); }, lang: language() === "en" ? "zh-Hans" : "en" }, language() === "en" ? "中文" : "English"),
    h("button", { class: "tool", onclick: help, "aria-label": t("nav.help"), title: t("nav.help") }, "?"));
  replace(document.body,
    h("a", { class: "skip", href: "#main", onclick: (event) => { event.preventDefault(); document.getElementById("main").focus(); } }, t("nav.skip")),
    h("header", { class: "bar" }, h("a", { href: "/", class: "mark", "aria-label": t("nav.home") }, mark(), h("span", {}, "gropius")), trail, tools),
    h("main", { id: "main", tabindex: -1 }),
    h("div", { id: "announcer", class: "unseen", role: "status", "aria-live": "polite" }),
    h("dialog", { id: "help", "aria-labelledby": "help-title" }));
}

function mark() {
  return h("svg", { viewBox: "0 0 32 32", width: 18, height: 18, "aria-hidden": "true", class: "logo" },
    [[3, 8, 21], [10, 3, 26], [17, 19, 10], [24, 23, 6]].map(([x, y, height]) => h("rect", { x, y, width: 5, height })));
}

export function trail(...steps) {
  const nav = document.getElementById("trail");
  const items = steps.map((step, i) => h("li", {}, i === steps.length - 1
    ? h("span", { "aria-current": "page" }, step.text) : h("a", { href: step.href }, step.text)));
  replace(nav, h("ol", {}, items));
  document.title = [...steps.map((step) => step.text)].reverse().concat("Gropius").join(" · ");
}

export const KEYS = [["/", "key.search"], ["j  k", "key.rows"], ["Enter", "key.open"], ["[  ]", "key.neighbours"], ["u", "key.up"],
  ["←  →", "key.tokens"], ["?", "key.help"]];

export function help() {
  const dialog = document.getElementById("help");
  replace(dialog, h("h2", { id: "help-title" }, t("nav.help")),
    h("dl", { class: "keys" }, KEYS.map(([keys, key]) => [h("dt", {}, keys.split("  ").map((k) => h("kbd", {}, k))), h("dd", {}, t(key))])),
    h("form", { method: "dialog" }, h("button", { class: "button" }, t("close"))));
  dialog.showModal();
}

export function typing(event) {
  const tag = event.target.tagName;
  return event.ctrlKey || event.metaKey || event.altKey || event.target.isContentEditable
    || tag === "INPUT" && event.target.type !== "checkbox" && event.target.type !== "radio" || tag === "SELECT" || tag === "TEXTAREA";
}

export function problem(message) {
  return h("div", { class: "problem", role: "alert" }, h("strong", {}, t("problem")), " ", message);
}

// Whose log this is, how it was read, and what it does not hold.
export function notes(run) {
  if (!run.notes?.length) return null;
  return h("details", { class: "notes", open: true }, h("summary", {}, t("imported", { from: run.imported })), h("ul", {}, run.notes.map((text) => h("li", {}, inert(text)))));
}

export function problems(list, open = false) {
  if (!list?.length) return null;
  return h("details", { class: "problems", open }, h("summary", {}, t("problems", { count: list.length })), h("ul", {}, list.map((text) => h("li", {}, inert(text)))));
}
