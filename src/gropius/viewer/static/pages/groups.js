// All groups of a step or of the run: queues, filter, sort, search; rows are drawn only where the reader looks.
import { get, latest, place, search } from "../api.js";
import { announce, h, inert, num, replace } from "../dom.js";
import { t } from "../i18n.js";
import { problems, trail } from "../shell.js";
import { stateMark, strip } from "./strip.js";

const QUEUES = ["all", "informative", "all_failed", "all_solved", "all_equal", "duplicates", "outliers", "truncated", "rejected", "void", "findings", "suspected"];
const SORTS = ["order", "newest", "mean", "mean_desc", "spread", "longest", "advantage", "duplicates"];
const PAGE = 100;
const ROW = 44;
const TALLEST = 15_000_000;
const AT_ONCE = 3;

export async function groupsPage(main, [id], query) {
  const run = await get(`runs/${encodeURIComponent(id)}`);
  const state = { step: query.get("step") ?? "", queue: query.get("queue") || "all", sort: query.get("sort") || "order", text: query.get("text") || "", task: query.get("task") || "", from: "" };
  const view = makeView(id, run, state);
  trail({ text: t("runs.title"), href: "/" }, { text: run.name, href: place.run(id) }, { text: state.step ? t("groups.of_step", { step: state.step }) : t("groups.all") });
  replace(main, view.node);
  await view.load();
  return { leave: view.leave, key: view.key, shown: view.paint };
}

function makeView(id, run, state) {
  const pages = new Map();
  const asked = new Set();
  let total = 0;
  let focus = -1;
  let flying = 0;
  let timer = null;
  const ask = latest((given, signal) => get(`runs/${encodeURIComponent(id)}/groups`, given, signal));
  const list = h("div", { class: "rows", role: "list", "aria-label": t("groups.list") });
  const tabs = h("div", { class: "queues", role: "group", "aria-label": t("groups.queues") });
  const note = h("p", { class: "quiet note", role: "status" });
  const said = h("div", {});

  const given = (offset) => ({ step: state.step, queue: state.queue, sort: state.sort, text: state.text, task: state.task, from: state.from, offset, limit: PAGE });
  const remember = () => history.replaceState(null, "", place.groups(id, { step: state.step, queue: state.queue === "all" ? "" : state.queue, sort: state.sort === "order" ? "" : state.sort, text: state.text, task: state.task }));

  async function load() {
    pages.clear();
    asked.clear();
    focus = -1;
    const found = await ask(given(0));
    if (!found) return;
    total = found.total;
    pages.set(0, found.rows);
    asked.add(0);
    replace(tabs, QUEUES.map((name) => h("button", { class: "queue", "aria-pressed": String(name === state.queue), onclick: () => change({ queue: name }) },
      t(`queue.${name}`), h("span", { class: "count" }, num(found.counts[name])))));
    const pressed = tabs.querySelector('[aria-pressed="true"]');
    if (pressed) tabs.scrollLeft = pressed.offsetLeft - tabs.offsetLeft - 40;
    sayNote(found);
    replace(said, problems(found.problems, !total), total ? null : h("p", { class: "lede" }, empty(found)));
    list.style.setProperty("height", `${Math.min(total * ROW, TALLEST)}px`);
    paint();
    announce(t("groups.found", { count: total }));
  }

  function sayNote(found) {
    clearTimeout(timer);
    const parts = [t("groups.found", { count: num(found.total) })];
    if (!state.step && found.indexed.steps < found.indexed.of) {
      parts.push(t("groups.indexing", { done: num(found.indexed.steps), of: num(found.indexed.of) }));
      timer = setTimeout(load, 1500);
    }
    if (found.searched) parts.push(t("groups.searched", { done: num(found.searched.steps), of: num(found.searched.of) }));
    replace(note, parts.join(" · "), found.searched?.next !== null && found.searched?.next !== undefined
      ? h("button", { class: "button small", onclick: () => change({ from: found.searched.next }, true) }, t("groups.search_on")) : null);
  }

  function empty(found) {
    if (found.counts.all) return t("groups.none_here");
    return t(state.step && found.problems.length ? "groups.none_damaged" : "groups.none");
  }

  // A few pages at a time: who drags past thousands of rows waits for those where the dragging ends, not for all.
  async function need(page) {
    if (asked.has(page) || flying >= AT_ONCE) return;
    asked.add(page);
    flying += 1;
    const found = await get(`runs/${encodeURIComponent(id)}/groups`, given(page * PAGE)).catch(() => null);
    flying -= 1;
    if (!found) { asked.delete(page); return; }
    pages.set(page, found.rows);
    paint();
  }

  // A browser has a tallest element. Below it a row has its own place; beyond it the scroll bar stands for a share of
  // the rows, and the rows near `anchor`, which is the one at the top of the window, are laid around it.
  function geometry() {
    const height = Math.min(total * ROW, TALLEST);
    const window = Math.min(innerHeight, height);
    const scrolled = Math.max(0, Math.min(height - window, -list.getBoundingClientRect().top));
    const anchor = height > window ? (scrolled / (height - window)) * (total - window / ROW) : 0;
    return { scrolled, anchor, share: total > window / ROW ? (height - window) / (total - window / ROW) : ROW };
  }

  function paint() {
    const { scrolled, anchor } = geometry();
    const first = Math.max(0, Math.floor(anchor) - 6);
    const last = Math.min(total, first + Math.ceil(innerHeight / ROW) + 12);
    const inside = list.contains(document.activeElement);
    const rows = [];
    for (let i = first; i < last; i++) {
      const page = Math.floor(i / PAGE);
      const row = pages.get(page)?.[i % PAGE];
      if (!row) need(page);
      rows.push(placed(row ? line(row, i) : h("div", { class: "row", "aria-hidden": "true" }, h("span", { class: "group-row quiet" }, num(i + 1))), scrolled + (i - anchor) * ROW));
    }
    replace(list, rows);
    if (inside) list.querySelector(`[data-at="${focus}"]`)?.focus({ preventScroll: true });
  }

  function placed(node, y) {
    node.style.setProperty("transform", `translateY(${y}px)`);
    return node;
  }

  function line(row, i) {
    return h("div", { role: "listitem", class: "row", "aria-setsize": total, "aria-posinset": i + 1 },
      h("a", { class: "group-row", href: place.group(id, row.step, row.group_id), "data-at": i, onfocus: () => { focus = i; } },
        h("span", { class: "cell id" }, row.group_id), h("span", { class: "cell bars" }, strip(row.rewards, row.advantages), h("span", { class: "unseen" }, t("siblings.count", { count: row.size }))),
        h("span", { class: "cell figure mean" }, num(row.mean, 3)), h("span", { class: "cell figure std" }, row.std === null ? "–" : `± ${num(row.std, 3)}`),
        h("span", { class: "cell" }, stateMark(row.state)), h("span", { class: "cell figure long" }, t("tokens.count", { count: num(row.longest) })),
        h("span", { class: "cell flags" }, flags(row)), h("span", { class: "cell task" }, inert(row.task_key))));
  }

  function change(values, keepFrom = false) {
    Object.assign(state, values);
    if (!keepFrom) state.from = "";
    remember();
    load();
  }

  const find = h("input", { type: "search", id: "find", value: state.text, placeholder: t("groups.find"), "aria-label": t("groups.find"), onchange: (event) => change({ text: event.target.value }) });
  const steps = h("select", { "aria-label": t("groups.scope"), onchange: (event) => change({ step: event.target.value }) },
    h("option", { value: "" }, t("groups.every_step")), [...run.rollout_steps].reverse().slice(0, 2000).map((step) => h("option", { value: step, selected: String(step) === state.step }, t("at_step", { step }))));
  const sort = h("select", { "aria-label": t("groups.sort"), onchange: (event) => change({ sort: event.target.value }) }, SORTS.map((name) => h("option", { value: name, selected: name === state.sort }, t(`sort.${name}`))));
  let waiting = false;
  const onscroll = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; paint(); });
  };
  addEventListener("scroll", onscroll, { passive: true });
  addEventListener("resize", onscroll, { passive: true });
  const node = h("div", { class: "groups" },
    h("div", { class: "headline" }, h("h1", {}, t("groups.title")), state.task ? h("p", { class: "status" }, t("groups.task"), " ", h("code", {}, inert(state.task)), h("button", { class: "button small", onclick: () => change({ task: "" }) }, t("clear"))) : null),
    h("div", { class: "filters" }, steps, sort, find), tabs, note, said, columns(), list);

  function key(event) {
    if (event.key === "/") { find.focus(); return true; }
    const move = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1 }[event.key];
    if (move === undefined || event.key.startsWith("Arrow") && !list.contains(document.activeElement)) {
      const at = run.rollout_steps.indexOf(Number(state.step));
      const other = event.key === "[" ? run.rollout_steps[at - 1] : event.key === "]" ? run.rollout_steps[at + 1] : undefined;
      if (other === undefined || at < 0) return false;
      steps.value = String(other);
      change({ step: String(other) });
      return true;
    }
    focus = Math.max(0, Math.min(total - 1, focus + move));
    const { scrolled, anchor, share } = geometry();
    const y = list.getBoundingClientRect().top + scrolled + (focus - anchor) * ROW;
    const beyond = y < 80 ? y - 120 : y > innerHeight - 80 ? y - innerHeight + 120 : 0;
    if (beyond) scrollBy(0, (beyond * share) / ROW);
    paint();
    list.querySelector(`[data-at="${focus}"]`)?.focus({ preventScroll: true });
    return true;
  }

  const leave = () => { clearTimeout(timer); removeEventListener("scroll", onscroll); removeEventListener("resize", onscroll); };
  return { node, load, leave, key, paint };
}

function columns() {
  const names = [["group", "id"], ["rewards", "bars"], ["mean", "figure mean"], ["std", "figure std"], ["state", ""], ["longest", "figure long"], ["flags", "flags"], ["task", "task"]];
  return h("div", { class: "group-row column-heads", "aria-hidden": "true" }, names.map(([name, kind]) => h("span", { class: `cell ${kind}` }, t(`column.${name}`))));
}

function flags(row) {
  return ["duplicates", "truncated", "rejected", "void"].filter((name) => row[name]).map((name) => h("span", { class: "flag" }, t(`flag.${name}`, { count: row[name] })))
    .concat(row.outlier ? [h("span", { class: "flag" }, t("flag.outlier"))] : []);
}

export { search };
