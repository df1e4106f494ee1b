// Addresses → pages. Every page is a function (main, match, query) that may return {leave, key} for its own end and keys.
import { get } from "./api.js";
import { redraw } from "./charts.js";
import { h, replace } from "./dom.js";
import { setLanguage, language } from "./i18n.js";
import { applyTheme, frame, help, problem, typing } from "./shell.js";
import { runsPage } from "./pages/runs.js";
import { runPage } from "./pages/run.js";
import { groupsPage } from "./pages/groups.js";
import { groupPage } from "./pages/group.js";
import { responsePage } from "./pages/response.js";
import { comparePage } from "./pages/compare.js";
import { benchPage } from "./pages/bench.js";

const ROUTES = [
  [/^\/$/, runsPage],
  [/^\/compare$/, comparePage],
  [/^\/bench(?:\/(\w+))?$/, benchPage],
  [/^\/runs\/([^/]+)$/, runPage],
  [/^\/runs\/([^/]+)\/groups$/, groupsPage],
  [/^\/runs\/([^/]+)\/steps\/(\d+)\/groups\/([^/]+)$/, groupPage],
  [/^\/runs\/([^/]+)\/steps\/(\d+)\/groups\/([^/]+)\/responses\/(\d+|greedy)$/, responsePage],
];

let current = null;
let turn = 0;

export async function show(focus = false) {
  const mine = ++turn;
  current?.leave?.();
  current = null;
  const main = document.getElementById("main");
  const query = new URLSearchParams(location.search);
  const found = ROUTES.map(([pattern, page]) => [pattern.exec(location.pathname), page]).find(([match]) => match);
  main.setAttribute("aria-busy", "true");
  const inner = h("div", { class: "page" });
  try {
    if (!found) throw new Error(location.pathname);
    const page = await found[1](inner, found[0].slice(1).map((part) => part && decodeURIComponent(part)), query);
    if (mine !== turn) { page?.leave?.(); return; }
    current = page || null;
  } catch (error) {
    if (mine !== turn) return;
    replace(inner, problem(error.message));
  }
  replace(main, inner);
  main.removeAttribute("aria-busy");
  if (focus) { window.scrollTo(0, 0); main.focus({ preventScroll: true }); }
  current?.shown?.();
}

export function go(address, replaceEntry = false) {
  if (replaceEntry) history.replaceState(null, "", address);
  else history.pushState(null, "", address);
  show(!replaceEntry);
}

document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href]");
  if (!link || event.defaultPrevented || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
  const address = new URL(link.href);
  if (address.origin !== location.origin || link.getAttribute("href").startsWith("#")) return;
  event.preventDefault();
  go(address.pathname + address.search);
});

document.addEventListener("keydown", (event) => {
  if (typing(event) || document.getElementById("help")?.open) return;
  if (event.key === "?") { event.preventDefault(); help(); return; }
  if (current?.key?.(event)) { event.preventDefault(); return; }
  if (event.key === "u") {
    const above = [...document.querySelectorAll("#trail a")].at(-1);
    if (above) { event.preventDefault(); go(above.getAttribute("href")); }
  }
});

window.addEventListener("popstate", () => show(true));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { applyTheme(); redraw(); });

function changed(what) {
  if (what === "language") { frame(changed); show(); } else redraw();
}

setLanguage(language());
applyTheme();
frame(changed);
show();
export { get };
