// Elements, numbers and times as text. Nothing here makes markup of data: a name that a client chose is text.

export const $ = (id) => document.getElementById(id);

const SVG = "http://www.w3.org/2000/svg";
const filled = (made, attributes, children) => {
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
};
export const el = (tag, attributes = {}, ...children) =>
  filled(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) =>
  filled(document.createElementNS(SVG, tag), attributes, children);

export const whole = (x) => Math.round(x).toLocaleString("en");

/** Three digits or so; what there is no number for is a dash. */
export function few(x) {
  if (x === null || !Number.isFinite(x)) return "–";
  const size = Math.abs(x);
  return size >= 100 || x === 0 ? whole(x) : x.toFixed(size >= 10 ? 1 : 2);
}

/** Milliseconds with their unit; many of them are seconds. */
export const duration = (ms) => (ms !== null && ms >= 10_000 ? `${few(ms / 1e3)} s` : `${few(ms)} ms`);

export const percent = (share) => (Number.isFinite(share) ? `${few(100 * share)} %` : "–");
export const clock = (unix) => new Date(1000 * unix).toLocaleTimeString("en-GB");

export function legend(list, entries) {
  list.replaceChildren(
    ...entries.map(([kind, name]) => el("li", {}, el("span", { class: `swatch ${kind}` }), name)),
  );
}

/** A bar of parts, [kind, share of the whole]. */
export function stack(parts) {
  const made = el("div", { class: "stack", "aria-hidden": "true" });
  for (const [kind, share] of parts) {
    const part = el("span", { class: kind });
    part.style.width = `${100 * Math.max(0, Math.min(1, share))}%`;
    made.append(part);
  }
  return made;
}

/** A labelled bar: a name, what it says in words, and its parts. */
export const bar = (name, words, parts) =>
  el(
    "div",
    { class: "bar" },
    el("div", { class: "label" }, el("span", {}, name), el("span", { class: "soft" }, words)),
    stack(parts),
  );
