// One response down to the token: shades, the arithmetic of the token in focus, and whether it all adds up.
import { get, place, search } from "../api.js";
import { announce, h, inert, num, percent, replace, signed } from "../dom.js";
import { t } from "../i18n.js";
import { go } from "../app.js";
import { trail } from "../shell.js";

// Each shade: the column it shows, whether it needs the arithmetic, and the value that has no colour.
const SHADES = {
  credit: { column: "credit", centre: 0 },
  ratio: { column: "log_ratio", centre: 0 },
  clip: { column: "clipped", made: true, centre: 0 },
  kl: { column: "kl", made: true, centre: 0 },
  reference: { column: "reference_gap", centre: 0 },
  entropy: { column: "entropy", centre: 0 },
  mismatch: { column: "sampler_gap", centre: 0 },
  contribution: { column: "contribution", centre: 0 },
  step: { column: "step", centre: 0 },
  value: { column: "value", centre: 0 },
};
const LEVELS = 9;

export async function responsePage(main, [id, step, groupId, member], query) {
  const base = `runs/${encodeURIComponent(id)}/steps/${step}/groups/${encodeURIComponent(groupId)}/responses/${member}`;
  const [run, head, first] = await Promise.all([get(`runs/${encodeURIComponent(id)}`), get(base), get(`${base}/tokens`, { start: windowOf(query) })]);
  trail({ text: t("runs.title"), href: "/" }, { text: run.name, href: place.run(id) }, { text: t("groups.of_step", { step }), href: place.groups(id, { step }) },
    { text: groupId, href: place.group(id, step, groupId) }, { text: member === "greedy" ? t("greedy") : `#${member}` });
  const view = makeView({ id, step, groupId, member, base, head, run }, query);
  view.take(first);
  replace(main, view.node);
  view.explain();
  return { key: view.key, shown: view.shown };
}

function windowOf(query) {
  const at = Number(query.get("token"));
  return Number.isInteger(at) && at > 0 ? Math.floor(at / 4096) * 4096 : 0;
}

function makeView(where, query) {
  const { id, step, groupId, member, base, head } = where;
  const model = { head, windows: new Map(), explained: new Map(), made: null, shade: query.get("shade") in SHADES ? query.get("shade") : "credit", at: Number(query.get("token") ?? -1) };
  const pane = h("div", { class: "tokens", role: "listbox", tabindex: 0, "aria-label": t("tokens.title"), "aria-orientation": "horizontal", onkeydown: (event) => { if (move(event)) event.preventDefault(); }, onmouseleave: () => { if (model.at >= 0) describe(model.at); } });
  const aside = h("aside", { class: "token-facts", "aria-label": t("token.facts"), "aria-live": "polite" });
  const legend = h("p", { class: "legend" });
  const adds = h("p", { class: "adds" });
  const paging = h("p", { class: "filters paging" });
  const shade = h("select", { "aria-label": t("shade"), onchange: (event) => { model.shade = event.target.value; remember(); paint(); } });

  function take(found) {
    model.windows.set(found.start, found);
    model.start = found.start;
    fill();
  }

  function fill() {
    const found = model.windows.get(model.start);
    const end = found.start + found.ids.length;
    const segments = head.segments.filter((s) => s.end > found.start && s.start < end);
    replace(pane, segments.map((segment) => h("div", { class: `segment ${segment.role}`, role: "group", "aria-label": t(`segment.${segment.role}`) },
      h("span", { class: "who", "aria-hidden": "true" }, t(`segment.${segment.role}`)), blocks(found, Math.max(segment.start, found.start), Math.min(segment.end, end)))));
    if (!found.ids.length) replace(pane, h("div", { role: "option", "aria-disabled": "true", "aria-selected": "false" }, head.text ? [h("span", { class: "quiet" }, t("tokens.text_only")), h("pre", {}, inert(head.text))] : t("tokens.none")));
    replace(paging, found.total > head.window ? [
      h("button", { class: "button small", disabled: found.start === 0, onclick: () => turnTo(found.start - head.window) }, "←"),
      h("span", {}, t("tokens.window", { from: num(found.start), to: num(end), of: num(found.total) })),
      h("button", { class: "button small", disabled: end >= found.total, onclick: () => turnTo(found.start + head.window) }, "→")] : []);
    shades();
    paint();
    if (model.at >= found.start && model.at < end) select(model.at, false);
  }

  function blocks(found, from, to) {
    const out = [];
    for (let start = from; start < to; start += 256) {
      const spans = [];
      for (let i = start; i < Math.min(start + 256, to); i++) spans.push(token(found, i));
      out.push(h("div", { class: "block", role: "presentation" }, spans));
    }
    return out;
  }

  function token(found, i) {
    const local = i - found.start;
    const text = found.texts ? found.texts[local] : `${found.ids[local]} `;
    const plain = text === "" ? "·" : text;
    const breaks = /\n$/.test(plain);
    return h("span", { class: "token", role: "option", id: `token-${i}`, "data-i": i, "aria-selected": "false", "aria-label": plain.trim() ? null : t(/\n/.test(plain) ? "token.newline" : "token.space"), onmouseenter: () => describe(i), onclick: () => { select(i); remember(); } },
      /^\n+$/.test(plain) ? h("span", { class: "newline" }, "↵") : inert(breaks ? plain.replace(/\n+$/, "") : plain), breaks ? "\n" : null);
  }

  async function turnTo(start, at = null) {
    const wanted = Math.max(0, start);
    if (!model.windows.has(wanted)) model.windows.set(wanted, await get(`${base}/tokens`, { start: wanted }));
    model.start = wanted;
    if (at !== null) model.at = at;
    model.made = model.explained.get(wanted) ?? null;
    fill();
    pane.scrollTop = 0;
    explain();
  }

  function shades() {
    const found = model.windows.get(model.start);
    const present = Object.entries(SHADES).filter(([, s]) => s.made ? model.made?.[s.column] : found.columns[s.column]);
    replace(shade, present.map(([name]) => h("option", { value: name, selected: name === model.shade }, t(`shade.${name}`))));
    if (present.length && !present.some(([name]) => name === model.shade)) shade.value = present[0][0];
  }

  const value = (name, i) => {
    const found = model.windows.get(model.start);
    const s = SHADES[name];
    const raw = s.made ? model.made?.[s.column]?.[i - found.start] : found.columns[s.column]?.[i - found.start];
    return typeof raw === "boolean" ? Number(raw) : raw;
  };

  function paint() {
    const name = shade.value || model.shade;
    const s = SHADES[name];
    const most = s.made ? Number(model.made?.most[s.column] ?? 0) : head.scales[s.column] || 0;
    for (const node of pane.querySelectorAll(".token")) {
      const x = value(name, Number(node.dataset.i));
      const level = x === null || x === undefined || !most ? 0 : Math.round((LEVELS * x) / most);
      const selected = node.classList.contains("at") ? " at" : "";
      node.setAttribute("class", `token ${level > 0 ? `p${level}` : level < 0 ? `m${-level}` : ""}${name === "clip" && x ? " flat" : ""}${selected}`);
    }
    replace(legend, h("span", { class: "swatch m9", "aria-hidden": "true" }), h("span", {}, signed(-most, 3)), h("span", { class: "swatch" }), h("span", {}, "0"), h("span", { class: "swatch p9", "aria-hidden": "true" }), h("span", {}, signed(most, 3)), h("span", { class: "quiet" }, t(`shade.${name}.what`)));
  }

  function select(i, scroll = true) {
    pane.querySelector(".at")?.classList.remove("at");
    const node = pane.querySelector(`#token-${i}`);
    if (!node) return;
    for (const other of pane.querySelectorAll('[aria-selected="true"]')) other.setAttribute("aria-selected", "false");
    node.classList.add("at");
    node.setAttribute("aria-selected", "true");
    pane.setAttribute("aria-activedescendant", node.id);
    model.at = i;
    if (scroll) node.scrollIntoView({ block: "nearest" });
    describe(i);
  }

  function describe(i) {
    const found = model.windows.get(model.start);
    const local = i - found.start;
    if (local < 0 || local >= found.ids.length) return;
    replace(aside, tokenFacts(where, found, model.made, i, local));
  }

  function move(event) {
    const found = model.windows.get(model.start);
    const jump = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10, PageUp: -100, PageDown: 100 }[event.key];
    let next = jump === undefined ? undefined : Math.max(model.at, 0) + (model.at < 0 ? 0 : jump);
    if (event.key === "Home") next = 0;
    if (event.key === "End") next = found.total - 1;
    if (next === undefined) return false;
    next = Math.max(0, Math.min(found.total - 1, next));
    if (next < found.start || next >= found.start + found.ids.length) turnTo(Math.floor(next / head.window) * head.window, next);
    else select(next);
    remember();
    return true;
  }

  function remember() {
    history.replaceState(null, "", place.response(id, step, groupId, member === "greedy" ? -1 : member, { token: model.at >= 0 ? model.at : "", shade: model.shade === "credit" ? "" : model.shade }));
  }

  async function explain() {
    const start = model.start;
    if (model.explained.has(start)) return;
    const made = await get(`${base}/arithmetic`, { start }).catch((error) => ({ missing: error.message }));
    if (made.missing) model.made = null;
    else model.explained.set(start, made);
    if (start !== model.start) return;
    model.made = made.missing ? null : made;
    shades();
    paint();
    if (model.at >= 0) describe(model.at);
    replace(adds, sums(head, made));
  }

  const node = h("div", { class: "response" },
    h("div", { class: "headline" }, h("h1", {}, member === "greedy" ? t("greedy") : t("response.title", { member })), h("p", { class: "status" },
      h("span", { class: `verdict ${head.status}` }, t(`status.${head.status || "unscored"}`)), h("span", {}, t("response.reward", { value: num(head.reward) })),
      h("span", {}, t("response.advantage", { value: head.advantage === null ? "–" : signed(head.advantage) })), head.ids ? h("span", {}, t("tokens.count", { count: num(head.tokens) })) : null, head.finish_reason ? h("span", {}, t(`finish.${head.finish_reason}`)) : null)),
    h("nav", { class: "members", "aria-label": t("siblings") }, head.siblings.map((m) => h("a", { href: place.response(id, step, groupId, m), "aria-current": String(m) === member ? "page" : null }, `#${m}`))),
    head.skipped ? h("p", { class: "lede" }, t("skipped.why")) : null,
    head.ids ? h("div", { class: "filters" }, h("label", {}, t("shade"), " ", shade), legend) : null, paging,
    h("div", { class: "reading" }, pane, aside), adds, facts(head));
  replace(aside, head.ids ? h("p", { class: "quiet" }, t("token.hint")) : null);

  function key(event) {
    const at = head.siblings.indexOf(Number(member));
    const other = event.key === "[" ? head.siblings[at - 1] : event.key === "]" ? head.siblings[at + 1] : undefined;
    if (other === undefined) return false;
    go(place.response(id, step, groupId, other, { shade: model.shade === "credit" ? "" : model.shade }));
    return true;
  }
  return { node, take, explain, key, shown: () => { if (model.at >= 0) { select(model.at); pane.focus({ preventScroll: true }); } } };
}

function tokenFacts(where, found, made, i, local) {
  const column = (name) => found.columns[name]?.[local];
  const masked = !found.mask[local];
  const pairs = [];
  const pair = (key, value, how = null) => { if (value !== undefined && value !== null) pairs.push(h("dt", {}, t(key)), h("dd", {}, value, how ? h("span", { class: "how" }, how) : null)); };
  const text = found.texts?.[local];
  const chance = (name) => (column(name) === undefined || column(name) === null ? undefined : percent(Math.exp(column(name))));
  const heading = h("p", { class: "glyph" }, h("span", { class: "token" }, text === undefined ? found.ids[local] : inert(text.replace(/\n/g, "↵") || "·")), h("span", { class: "quiet" }, ` ${t("token.number", { at: i, id: found.ids[local] })}`));
  if (masked) return [heading, h("p", {}, t("token.masked"))];
  pair("token.sampler", chance("sampler"));
  pair("token.anchor", chance("anchor"));
  pair("token.policy", chance("policy"));
  pair("token.reference", chance("reference"));
  pair("token.entropy", column("entropy") === undefined ? undefined : num(column("entropy")));
  pair("token.mismatch", column("sampler_gap") === undefined ? undefined : signed(column("sampler_gap")));
  pair("token.advantage", column("advantage") === null ? undefined : signed(column("advantage")));
  pair("token.weight", column("weight") === undefined ? undefined : num(column("weight")));
  if (made) {
    const at = local;
    pair("token.ratio", num(made.ratio[at]), made.clipped[at] ? t("token.flat") : null);
    pair("token.surrogate", signed(made.surrogate[at]), made.kept && !made.kept[at] ? t("token.left_out") : null);
    if (where.head.kl_in_loss) pair("token.kl", num(made.kl[at]), `× ${num(where.head.coefficient)}`);
    if (where.head.entropy_bonus && made.entropy) pair("token.bonus", num(made.entropy[at]), `× ${num(where.head.entropy_bonus)}`);
    pair("token.contribution", signed(made.contribution[at]), equation(where.head, column("weight"), made, local));
    pair("token.gradient", signed(made.gradient[at]));
  } else pair("token.contribution", column("contribution") === undefined ? undefined : signed(column("contribution")));
  return [heading, h("dl", { class: "pairs" }, pairs)];
}

function equation(head, weight, made, at) {
  const factor = made.correction[at] === 1 ? "" : `${num(made.correction[at])} · `;
  const kl = head.kl_in_loss ? ` + ${num(head.coefficient)} · ${num(made.kl[at])}` : "";
  const bonus = head.entropy_bonus && made.entropy ? ` − ${num(head.entropy_bonus)} · ${num(made.entropy[at])}` : "";
  const imitation = made.imitation?.[at] ? ` − ${num(made.imitation[at])} · log π` : "";
  return `${num(weight)} · (−${factor}${made.surrogate[at] < 0 ? `(${signed(made.surrogate[at])})` : num(made.surrogate[at])}${kl}${bonus})${imitation}`;
}

function sums(head, made) {
  const out = [];
  if (!head.ids && head.text) out.push(t("adds.text_only"));
  else if (made.missing) out.push(head.skipped ? t("adds.response", { sum: "0" }) : t("adds.missing", { what: made.missing }));
  else {
    out.push(t("adds.response", { sum: signed(made.sum) }));
    if (made.gap !== null) out.push(made.gap <= 1e-6 ? t("adds.same") : t("adds.gap", { gap: num(made.gap) }));
  }
  const b = head.balance;
  if (b) out.push(Math.abs(b.gap) <= 1e-5 * Math.max(1, Math.abs(b.logged)) ? t("adds.step", { logged: signed(b.logged) }) : t("adds.step_gap", { sum: signed(b.sum), logged: signed(b.logged), gap: num(Math.abs(b.gap)) }));
  announce(out.join(" "));
  return out.map((line) => h("span", {}, line, " "));
}

function facts(head) {
  const rows = [["steps", head.steps.map((s) => `${s.part} ${signed(s.score)} @${s.token}${s.note ? ` (${s.note})` : ""}`).join(", ")], ["branched", head.branched_tokens ? num(head.branched_tokens) : ""], ["demonstration", head.demonstration ? "✓" : ""], ["parts", head.parts.map((p) => `${p.name} ${num(p.value)}${p.reason ? ` (${p.reason})` : ""}`).join(", ")], ["reason", head.reason], ["error", head.error],
    ["policy_version", num(head.policy_version)], ["weight_digest", head.weight_digest], ["sampling_time", `${num(head.sampling_time_s, 3)} s`], ["scoring_time", `${num(head.scoring_time_s, 3)} s`], ["update", num(head.update)]].filter(([, value]) => value);
  return h("details", { class: "recipe" }, h("summary", {}, t("response.facts")), h("dl", { class: "pairs" }, rows.map(([key, value]) => [h("dt", {}, t(`fact.${key}`)), h("dd", {}, inert(String(value)))])),
    h("h3", {}, t("conversation")), head.messages.map((message) => h("div", { class: "message" }, h("span", { class: "role" }, inert(String(message.role ?? ""))), h("div", { class: "text" }, inert(String(message.content ?? "")),
      message.tool_calls ? h("pre", { class: "tool-call" }, inert(JSON.stringify(message.tool_calls, null, 1))) : null))));
}

export { search };
