// One group: how the advantages came about, then the siblings side by side, and two of them compared.
import { get, place, search } from "../api.js";
import { announce, h, inert, num, replace, short, signed } from "../dom.js";
import { t } from "../i18n.js";
import { trail } from "../shell.js";
import { go } from "../app.js";
import { stateMark, stateWord, strip } from "./strip.js";

export async function groupPage(main, [id, step, groupId], query) {
  const base = `runs/${encodeURIComponent(id)}/steps/${step}/groups/${encodeURIComponent(groupId)}`;
  const [run, group] = await Promise.all([get(`runs/${encodeURIComponent(id)}`), get(base)]);
  trail({ text: t("runs.title"), href: "/" }, { text: run.name, href: place.run(id) }, { text: t("groups.of_step", { step }), href: place.groups(id, { step }) }, { text: groupId });
  const rewards = group.responses.map((r) => r.reward);
  const advantages = group.responses.map((r) => r.advantage);
  const { previous, next, index, count } = group.position;
  const beside = (other, key, sign) => (other ? h("a", { href: place.group(id, step, other), rel: key, "aria-label": t(key) }, sign) : h("span", { class: "quiet", "aria-hidden": "true" }, sign));
  replace(main,
    h("div", { class: "headline" }, h("h1", {}, t("group.title"), " ", h("span", { class: "id" }, groupId)),
      h("p", { class: "status" }, stateMark(group.state), strip(rewards, advantages, { height: 26, width: 10 }),
        h("span", { class: "pager" }, beside(previous, "previous", "←"), h("span", { class: "quiet" }, `${index + 1} / ${count}`), beside(next, "next", "→")))),
    h("p", { class: "lede" }, t(`diagnosis.${group.state}`)),
    group.findings.length ? h("ul", { class: "findings" }, group.findings.map((f) => h("li", { class: "finding" }, h("strong", {}, inert(String(f.name ?? ""))), " ", inert(String(f.message ?? f.text ?? ""))))) : null,
    prompt(group), arithmetic(group, id, step), siblings(group, id, step, groupId), compare(base, group, query, id, step, groupId), elsewhere(id, group, step));
  return {
    key: (event) => {
      const other = event.key === "[" ? previous : event.key === "]" ? next : null;
      if (other) go(place.group(id, step, other));
      return Boolean(other);
    },
  };
}

function prompt(group) {
  const parts = group.messages.length ? group.messages : [{ role: "user", content: group.prompt }];
  return h("section", { class: "prompt", "aria-label": t("prompt") }, h("h2", {}, t("prompt"), h("span", { class: "quiet" }, group.prompt_tokens ? ` ${t("tokens.count", { count: num(group.prompt_tokens) })} ·` : "", " ", inert(short(group.task_key, 80)))),
    parts.map((message) => h("div", { class: "message" }, h("span", { class: "role" }, inert(String(message.role ?? ""))), h("div", { class: "text" }, inert(String(message.content ?? ""))))));
}

function arithmetic(group, id, step) {
  const replay = group.replay;
  if (!replay || replay.reason) return h("p", { class: "quiet" }, replay?.reason ? t("replay.not", { reason: replay.reason }) : t("replay.none"));
  const axis = replay.axis;
  const row = (name, formula, values, strong, sign) => h("tr", { class: strong ? "strong" : null },
    h("th", { scope: "row" }, name, h("span", { class: "how" }, formula)), values.map((value, i) => h("td", { class: `figure ${sign && value > 0 ? "plus" : sign && value < 0 ? "minus" : ""}` }, group.responses[i].status === "void" ? "–" : sign ? signed(value) : num(value))));
  const columns = group.responses.map((r) => h("th", { scope: "col", class: "figure" }, h("a", { href: place.response(id, step, group.group_id, r.member) }, `#${r.member}`)));
  return h("section", { class: "arithmetic", "aria-label": t("replay.title") }, h("h2", {}, t("replay.title")),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": t("replay.title") }, h("table", { class: "data" }, h("thead", {}, h("tr", {}, h("td", {}), columns)), h("tbody", {},
      row(t("replay.reward"), "R", group.responses.map((r) => r.reward)),
      row(t("replay.baseline"), t(`baseline.${axis.baseline}`), replay.baseline),
      row(t("replay.centred"), "R − b", replay.centred, false, true),
      row(t("replay.scale"), scaleWords(axis), replay.scale),
      row(t("replay.advantage"), t("replay.recorded"), group.responses.map((r) => r.advantage), true, true)))),
    h("p", { class: "formula small quiet" }, `A = ${replay.formula}`), replay.agrees ? null : h("p", { class: "warning" }, t("replay.differs")));
}

export function scaleWords(axis) {
  if (axis.scale === "none") return t("scale.none");
  const epsilon = axis.epsilon ? ` + ${num(axis.epsilon)}` : "";
  if (axis.scale === "group_mean") return t("scale.group_mean") + epsilon;
  return t(axis.ddof ? "scale.sample" : "scale.population", { of: t(`scale.of.${axis.scale}`) }) + epsilon;
}

function siblings(group, id, step, groupId) {
  const all = group.greedy ? [...group.responses, group.greedy] : group.responses;
  const largest = Math.max(...group.responses.map((r) => Math.abs(r.advantage ?? 0)), 1e-12);
  return h("section", { "aria-label": t("siblings") }, h("h2", {}, t("siblings")),
    h("div", { class: `siblings ${group.responses.every((r) => r.text.length < 160) ? "narrow" : ""}`, tabindex: 0, role: "region", "aria-label": t("siblings") }, all.map((r) => card(r, largest, place.response(id, step, groupId, r.member)))));
}

function card(r, largest, href) {
  const bar = h("svg", { class: "balance", viewBox: "-100 0 200 6", preserveAspectRatio: "none", "aria-hidden": "true" },
    h("line", { x1: 0, x2: 0, y1: 0, y2: 6, class: "axis" }),
    r.advantage ? h("rect", { x: r.advantage > 0 ? 0 : (100 * r.advantage) / largest, y: 1, width: Math.abs((100 * r.advantage) / largest), height: 4, class: `bar ${r.advantage > 0 ? "plus" : "minus"}` }) : null);
  const facts = [r.ids ? t("tokens.count", { count: num(r.tokens) }) : null, r.finish_reason ? t(`finish.${r.finish_reason}`) : null, r.duplicate ? t("duplicate") : null, r.skipped ? t("skipped") : null].filter(Boolean);
  return h("article", { class: `sibling ${r.status === "void" ? "void" : ""}`, "aria-label": r.member < 0 ? t("greedy") : t("sibling.label", { member: r.member, reward: num(r.reward), advantage: signed(r.advantage) }) },
    h("header", {}, h("a", { href, class: "member" }, r.member < 0 ? t("greedy") : `#${r.member}`),
      h("span", { class: `verdict ${r.status}` }, t(`status.${r.status || "unscored"}`)), h("span", { class: "figure reward" }, num(r.reward)),
      h("span", { class: `figure advantage ${r.advantage > 0 ? "plus" : r.advantage < 0 ? "minus" : ""}` }, r.advantage === null ? "–" : signed(r.advantage))),
    bar,
    h("ul", { class: "parts" }, r.parts.map((p) => h("li", {}, h("span", {}, inert(p.name)), h("span", { class: "figure" }, p.status === "void" ? t("status.void") : num(p.value)), p.reason ? h("span", { class: "reason" }, inert(p.reason)) : null)),
      r.reason && !r.parts.some((p) => p.reason && r.reason.endsWith(p.reason)) ? h("li", {}, h("span", { class: "reason" }, inert(r.reason))) : null),
    h("p", { class: "facts" }, facts.join(" · ")),
    h("div", { class: "text", tabindex: 0, role: "region", "aria-label": t("sibling.text", { member: r.member }) }, inert(r.text.length > 20000 ? `${r.text.slice(0, 20000)}…` : r.text)),
    h("a", { href, class: "open" }, t("sibling.open")));
}

function compare(base, group, query, id, step, groupId) {
  const members = group.responses.map((r) => r.member);
  if (members.length < 2) return null;
  const start = (query.get("diff") || "").split(",").map(Number);
  const best = [...group.responses].sort((a, b) => (b.advantage ?? 0) - (a.advantage ?? 0));
  const [a, b] = members.includes(start[0]) && members.includes(start[1]) ? start : [best[0].member, best.at(-1).member];
  const out = h("div", { class: "diff text", role: "region", tabindex: 0, "aria-label": t("diff.title") });
  const pick = (value, label) => h("select", { "aria-label": label, onchange: () => load(true) }, members.map((m) => h("option", { value: m, selected: m === value }, `#${m}`)));
  const first = pick(a, t("diff.first"));
  const second = pick(b, t("diff.second"));
  async function load(remember) {
    const found = await get(`${base}/difference`, { a: first.value, b: second.value });
    if (remember) history.replaceState(null, "", place.group(id, step, groupId) + search({ diff: `${first.value},${second.value}` }));
    replace(out, found.runs.map(([kind, left, right]) => (kind === "equal" ? h("span", {}, inert(left)) : [left ? h("del", {}, inert(left)) : null, right ? h("ins", {}, inert(right)) : null])));
    announce(t("diff.similar", { percent: Math.round(100 * found.similarity) }));
    replace(similar, t("diff.similar", { percent: Math.round(100 * found.similarity) }));
  }
  const similar = h("span", { class: "quiet" });
  load(false);
  return h("section", { class: "compare", "aria-label": t("diff.title") }, h("h2", {}, t("diff.title")), h("p", { class: "filters" }, first, h("span", {}, t("diff.with")), second, similar), out);
}

function elsewhere(id, group, step) {
  const list = h("ul", { class: "elsewhere" });
  const section = h("section", { "aria-label": t("elsewhere") }, h("h2", {}, t("elsewhere")), list);
  const ask = () => get(`runs/${encodeURIComponent(id)}/task`, { key: group.task_key }).then(({ rows, indexed }) => {
    if (!indexed) setTimeout(() => { if (section.isConnected) ask(); }, 1500);
    if (!rows.length) { replace(list, h("li", { class: "quiet" }, t("elsewhere.none"))); return; }
    replace(list, rows.slice(-200).map((row) => h("li", {}, h("a", { href: place.group(id, row.step, row.group_id), "aria-current": row.group_id === group.group_id && row.step === Number(step) ? "true" : null, "aria-label": `${t("at_step", { step: row.step })}: ${stateWord(row.state)}, ${num(row.mean, 3)}` },
      h("span", { class: "figure" }, row.step), strip(row.rewards, row.advantages, { height: 18, width: 6 })))));
  });
  ask();
  return section;
}
