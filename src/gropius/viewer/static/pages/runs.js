// All runs that may be shown.
import { get, place } from "../api.js";
import { h, num, percent, replace } from "../dom.js";
import { t } from "../i18n.js";
import { problems, trail } from "../shell.js";

export async function runsPage(main) {
  const { runs } = await get("about");
  trail({ text: t("runs.title") });
  if (!runs.length) {
    replace(main, h("h1", {}, t("runs.none")), h("p", { class: "lede" }, t("runs.none.more")), h("p", {}, h("a", { class: "button", href: "/bench/group" }, t("nav.bench"))));
    return {};
  }
  const chosen = new Set();
  const compare = h("a", { class: "button", href: "/compare", "aria-disabled": "true" }, t("runs.compare"));
  const update = () => {
    compare.setAttribute("href", `/compare?runs=${[...chosen].map(encodeURIComponent).join(",")}`);
    compare.setAttribute("aria-disabled", String(chosen.size < 2));
  };
  const rows = runs.map((run) => h("tr", {},
    h("td", {}, h("input", { type: "checkbox", "aria-label": t("runs.choose", { name: run.name }), onchange: (event) => { event.target.checked ? chosen.add(run.id) : chosen.delete(run.id); update(); } })),
    h("th", { scope: "row" }, h("a", { href: place.run(run.id) }, run.name), run.live ? h("span", { class: "live" }, t("run.live")) : null, problems(run.problems)),
    h("td", { class: "objective-name" }, run.preset || (run.imported ? t("run.log_of", { from: run.imported }) : "–")),
    h("td", { class: "figure" }, run.asked_steps ? `${num(run.steps)} / ${num(run.asked_steps)}` : num(run.steps)),
    h("td", { class: "figure" }, num(run.reward)),
    h("td", { class: "figure" }, percent(run.held_out))));
  const head = ["", "runs.name", "runs.objective", "runs.steps", "runs.reward", "runs.heldout"];
  replace(main, h("div", { class: "headline" }, h("h1", {}, t("runs.title")), runs.length > 1 ? compare : null),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": t("runs.title") }, h("table", { class: "data wide" },
      h("thead", {}, h("tr", {}, head.map((key, i) => (key ? h("th", { scope: "col", class: i > 2 ? "figure" : i === 2 ? "objective-name" : null }, t(key)) : h("td", {}))))), h("tbody", {}, rows))));
  return {};
}
