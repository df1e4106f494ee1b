// Figures by the packaged chart library, in the page's own colours, each with its numbers as a table.
import { get } from "./api.js";
import { h, num, replace } from "./dom.js";
import { t } from "./i18n.js";

let loading = null;
const drawn = new Set();

function library() {
  // The library asks for style elements by id before it writes its own; ours are empty, its rules stand in style.css.
  loading ??= get("about").then(({ chart_style_ids: ids }) => new Promise((resolve, reject) => {
    for (const id of ids) document.head.append(h("template", { id, class: "no-inline-styles" }));
    const script = h("script", { src: "/vendor/plotly.js" });
    script.addEventListener("load", () => resolve(window.Plotly));
    script.addEventListener("error", () => reject(new Error(t("chart.missing"))));
    document.head.append(script);
  }));
  return loading;
}

export function colours() {
  const style = getComputedStyle(document.documentElement);
  const pick = (name) => style.getPropertyValue(`--${name}`).trim();
  return { ink: pick("ink"), soft: pick("soft"), line: pick("line"), accent: pick("accent"), minus: pick("minus"),
    paper: pick("paper"), third: pick("third"), warn: pick("warn"), font: pick("sans") };
}

// spec: {title, meaning, unit, x, lines: [{name, x, y, low, high, colour, dash, step}], marks: [{x, text}], height, range}
export function figure(spec) {
  const plot = h("div", { class: "plot", role: "img", "aria-label": summary(spec) });
  const table = h("details", { class: "numbers", ontoggle: () => fill(table, spec) }, h("summary", {}, t("chart.numbers")));
  const node = h("figure", { class: `chart ${spec.class || ""}` },
    h("figcaption", {}, h("strong", {}, spec.title), spec.latest === undefined ? null : h("span", { class: "latest" }, num(spec.latest, 3)),
      h("span", { class: "meaning" }, spec.meaning || "")),
    plot, table);
  node.spec = spec;
  node.plot = plot;
  watcher().observe(node);
  return node;
}

export function update(node, spec) {
  node.spec = spec;
  node.plot.setAttribute("aria-label", summary(spec));
  const caption = node.querySelector(".latest");
  if (caption && spec.latest !== undefined) caption.textContent = num(spec.latest, 3);
  const table = node.querySelector("details");
  if (table.open) fill(table, spec);
  if (drawn.has(node)) draw(node);
}

export function redraw() {
  for (const node of drawn) {
    if (node.isConnected) draw(node);
    else { drawn.delete(node); window.Plotly?.purge(node.plot); }
  }
}

let seen = null;
function watcher() {
  seen ??= new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      seen.unobserve(entry.target);
      drawn.add(entry.target);
      draw(entry.target);
    }
  }, { rootMargin: "200px" });
  return seen;
}

async function draw(node) {
  try {
    const plotly = await library();
    if (!node.isConnected) return;
    await plotly.react(node.plot, traces(node.spec), layout(node.spec), { displayModeBar: false, responsive: true, showTips: false });
  } catch (error) {
    replace(node.plot, h("p", { class: "quiet" }, error.message));
  }
}

function traces(spec) {
  const c = colours();
  const out = [];
  for (const line of spec.lines) {
    const colour = c[line.colour || "accent"];
    if (line.low) {
      out.push({ x: [...line.x, ...[...line.x].reverse()], y: [...line.high, ...[...line.low].reverse()], fill: "toself",
        fillcolor: fade(colour, 0.16), line: { width: 0 }, mode: "lines", hoverinfo: "skip", showlegend: false });
    }
    if (spec.bars) {
      out.push({ type: "bar", x: line.x, y: line.y, name: line.name, marker: { color: colour }, hovertemplate: `%{x}: %{y:.4g}<extra>${plain(line.name)}</extra>` });
      continue;
    }
    out.push({ x: line.x, y: line.y, name: line.name, mode: line.points || line.x.length === 1 ? "lines+markers" : "lines", marker: { size: 5 },
      line: { color: colour, width: 1.6, dash: line.dash || "solid" }, hovertemplate: `${plain(spec.x || "")} %{x}: %{y:.4g}<extra>${plain(line.name)}</extra>` });
  }
  return out;
}

function layout(spec) {
  const c = colours();
  const axis = { gridcolor: c.line, linecolor: c.line, zerolinecolor: c.line, tickfont: { color: c.soft, size: 10.5 }, automargin: true, exponentformat: "e", minexponent: 4, fixedrange: !spec.zoom };
  return {
    height: spec.height || 148, margin: { l: 38, r: 8, t: spec.lines.length > 1 && spec.legend !== false ? 24 : 6, b: 22 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: c.font, color: c.ink, size: 11 }, showlegend: spec.lines.length > 1 && spec.legend !== false,
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, itemwidth: 18, font: { size: 10.5, color: c.soft }, bgcolor: "rgba(0,0,0,0)" },
    xaxis: { ...axis, showgrid: false, title: spec.showX ? { text: plain(spec.x || ""), font: { size: 11, color: c.soft } } : undefined, type: spec.categories ? "category" : undefined, dtick: whole(spec) },
    yaxis: { ...axis, range: spec.range || level(spec), nticks: 5, title: spec.y ? { text: plain(spec.y), font: { size: 11, color: c.soft } } : undefined }, barmode: "group", bargap: 0.35,
    hovermode: "x", hoverlabel: { bgcolor: c.paper, bordercolor: c.line, font: { color: c.ink, size: 11.5 } },
    shapes: (spec.marks || []).map((mark) => ({ type: "line", x0: mark.x, x1: mark.x, yref: "paper", y0: 0, y1: 1, line: { color: c[mark.colour || "soft"], width: 1, dash: "dot" } })),
  };
}

// A few steps get a tick each, not one at every half step.
function whole(spec) {
  const xs = spec.lines.flatMap((line) => line.x).concat((spec.marks || []).map((mark) => mark.x));
  const near = !spec.categories && xs.length && xs.every(Number.isInteger) && Math.max(...xs) - Math.min(...xs) <= 6;
  return near ? 1 : undefined;
}

// A line that never moves gets an axis of its own size instead of one from -1 to 1; at 0 it stands at the foot.
function level(spec) {
  const values = spec.lines.flatMap((line) => line.y).filter((y) => y !== null && y !== undefined);
  if (!values.length || values.some((y) => y !== values[0])) return undefined;
  return values[0] ? [Math.min(0, 2 * values[0]), Math.max(0, 2 * values[0])] : [0, 1];
}

// The library reads a little markup in names; ours have none.
function plain(text) {
  return String(text).replace(/[<>&]/g, " ");
}

function fade(colour, alpha) {
  const part = (at) => parseInt(colour.slice(at, at + 2), 16);
  return colour.startsWith("#") && colour.length === 7 ? `rgba(${part(1)},${part(3)},${part(5)},${alpha})` : colour;
}

function summary(spec) {
  const parts = spec.lines.map((line) => {
    const values = line.y.filter((value) => value !== null && value !== undefined);
    if (!values.length) return `${line.name}: ${t("chart.empty")}`;
    return t("chart.summary", { name: line.name, first: num(values[0], 3), last: num(values.at(-1), 3),
      low: num(Math.min(...values), 3), high: num(Math.max(...values), 3) });
  });
  return `${spec.title}. ${parts.join(". ")}`;
}

function fill(details, spec) {
  if (!details.open) return;
  const xs = [...new Set(spec.lines.flatMap((line) => line.x))].slice(-200);
  const at = spec.lines.map((line) => new Map(line.x.map((x, i) => [x, line.y[i]])));
  const head = h("tr", {}, h("th", { scope: "col" }, spec.x || ""), spec.lines.map((line) => h("th", { scope: "col" }, line.name)));
  const rows = xs.map((x) => h("tr", {}, h("th", { scope: "row" }, num(x)), at.map((values) => h("td", {}, num(values.get(x) ?? null)))));
  details.querySelector(".scroll")?.remove();
  details.append(h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": spec.title }, h("table", { class: "data" }, h("thead", {}, head), h("tbody", {}, rows))));
}
