// The workbench: five benches over the package's own arithmetic. Their state is in the address.
import { get } from "../api.js";
import { h, replace } from "../dom.js";
import { t } from "../i18n.js";
import { trail } from "../shell.js";
import { groupBench } from "./bench_group.js";
import { weightsBench } from "./bench_weights.js";
import { ratioBench } from "./bench_ratio.js";
import { klBench } from "./bench_kl.js";
import { budgetBench } from "./bench_budget.js";

const BENCHES = { group: groupBench, weights: weightsBench, ratio: ratioBench, kl: klBench, budget: budgetBench };

export async function benchPage(main, [name], query) {
  const chosen = name in BENCHES ? name : "group";
  trail({ text: t("nav.bench"), href: "/bench/group" }, { text: t(`bench.${chosen}`) });
  const presets = await get("presets");
  const tabs = h("nav", { class: "queues", "aria-label": t("nav.bench") }, Object.keys(BENCHES).map((key) => h("a", { class: "queue", href: `/bench/${key}`, "aria-current": key === chosen ? "page" : null }, t(`bench.${key}`))));
  const inside = h("div", { class: "bench" });
  const remember = (values) => history.replaceState(null, "", `/bench/${chosen}?${new URLSearchParams(values)}`);
  replace(main, tabs, h("div", { class: "headline" }, h("h1", {}, t(`bench.${chosen}.title`))), h("p", { class: "lede" }, t(`bench.${chosen}.lede`)), inside, h("p", { class: "quiet constructed" }, t("bench.constructed")));
  return (await BENCHES[chosen](inside, query, { presets, remember })) || {};
}
