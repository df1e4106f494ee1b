// A group at a glance: one bar a sibling, its height the reward, its colour the side of the mean it is on.
import { h } from "../dom.js";
import { t } from "../i18n.js";

export function strip(rewards, advantages, { low = 0, high = 1, height = 22, width = 8 } = {}) {
  const shown = rewards.slice(0, 64);
  const least = Math.min(low, ...shown.filter((r) => r !== null));
  const most = Math.max(high, ...shown.filter((r) => r !== null));
  const span = most - least || 1;
  const bars = shown.map((reward, i) => {
    const x = i * width;
    if (reward === null) return h("rect", { x: x + 0.5, y: 1, width: width - 3, height: height - 2, class: "bar void" });
    const tall = 2 + (height - 2) * ((reward - least) / span);
    const sign = advantages[i] > 0 ? "plus" : advantages[i] < 0 ? "minus" : "none";
    return h("rect", { x, y: height - tall, width: width - 2, height: tall, class: `bar ${sign}` });
  });
  return h("svg", { class: "strip", viewBox: `0 0 ${shown.length * width} ${height}`, width: shown.length * width, height, "aria-hidden": "true", preserveAspectRatio: "xMinYMid meet" }, bars);
}

export function stateWord(state) {
  return t(`state.${state || "none"}`);
}

export function stateMark(state) {
  return h("span", { class: `state ${state}` }, stateWord(state));
}
