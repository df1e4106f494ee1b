// Two languages. A key that a language lacks is shown in English; the tests allow none.
import { en } from "./strings.en.js";
import { zh } from "./strings.zh.js";

const LANGUAGES = { en, zh };
let current = "en";
try {
  current = localStorage.getItem("language") || (navigator.language.startsWith("zh") ? "zh" : "en");
} catch { /* storage is off: English */ }
if (!(current in LANGUAGES)) current = "en";

export function t(key, values = {}) {
  const text = LANGUAGES[current][key] ?? en[key] ?? key;
  return text.replace(/\{(\w+)\}/g, (whole, name) => (name in values ? String(values[name]) : whole));
}

export function has(key) {
  return key in en;
}

export function language() {
  return current;
}

export function setLanguage(name) {
  current = name in LANGUAGES ? name : "en";
  document.documentElement.lang = current === "zh" ? "zh-Hans" : "en";
  try { localStorage.setItem("language", current); } catch { /* storage is off */ }
}
