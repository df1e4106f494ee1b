// Questions to the server. An answer that is no longer wanted is dropped.

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function get(path, query = {}, signal = undefined) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const search = new URLSearchParams(given).toString();
  return answer(await fetch(`/api/${path}${search ? `?${search}` : ""}`, { signal, credentials: "same-origin" }));
}

export async function bench(name, body, signal = undefined) {
  return answer(await fetch(`/api/bench/${name}`, {
    method: "POST", signal, credentials: "same-origin",
    headers: { "content-type": "application/json" }, body: JSON.stringify(body),
  }));
}

async function answer(response) {
  if (response.ok) return response.json();
  let message = `${response.status}`;
  const text = await response.text();
  try { message = JSON.parse(text).error; } catch { message = text.trim() || message; }
  throw new Refused(response.status, message);
}

// One running question at a time: a later call ends an earlier one.
export function latest(ask) {
  let controller = null;
  return async (...given) => {
    controller?.abort();
    controller = new AbortController();
    const mine = controller;
    try {
      const found = await ask(...given, mine.signal);
      return mine === controller ? found : undefined;
    } catch (error) {
      if (error.name === "AbortError") return undefined;
      throw error;
    }
  };
}

export const place = {
  run: (run) => `/runs/${encodeURIComponent(run)}`,
  groups: (run, query = {}) => `${place.run(run)}/groups${search(query)}`,
  group: (run, step, group) => `${place.run(run)}/steps/${step}/groups/${encodeURIComponent(group)}`,
  response: (run, step, group, member, query = {}) => `${place.group(run, step, group)}/responses/${member < 0 ? "greedy" : member}${search(query)}`,
};

export function search(query) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const text = new URLSearchParams(given).toString();
  return text ? `?${text}` : "";
}
