// Lines over the last minutes, as SVG.

import { clock, el, few, svg } from "./dom.js";

const HEIGHT = 150,
  LEFT = 52,
  RIGHT = 10,
  TOP = 10,
  BOTTOM = 22;
const WINDOWS_S = [60, 120, 300, 600, 1200];
const BREAK_S = 5; // samples that are further apart have no line between them

/** The least of 1, 2, 2.5 and 5 times a power of ten that four times is as large as what is shown. */
function tick(most) {
  const power = 10 ** Math.floor(Math.log10(Math.max(most, 1e-9) / 4));
  return [1, 2, 2.5, 5, 10].map((x) => x * power).find((x) => 4 * x >= most);
}

/** The largest value that is seen whole: not that of a few that are far above the others (a step that was
 * compiled). */
function seen(values) {
  const sorted = values.filter((y) => y !== null).sort((a, b) => a - b);
  const most = sorted.at(-1) ?? 0,
    usual = sorted[Math.floor(0.9 * (sorted.length - 1))] ?? 0;
  return most > 5 * usual && usual > 0 ? 2 * usual : most;
}

export class Chart {
  /** `series`: [{name, kind}], of which `kind` is a class that gives the colour; `optional` ones are not said
   * while they have no value. `words`: of a value. */
  constructor(parent, { title, unit, series, least = 1, words = few }) {
    this.unit = unit;
    this.words = words;
    this.series = series;
    this.least = least; // of the axis' end
    this.values = series.map(() => el("b"));
    const entries = series.map(({ name, kind }, i) =>
      el("li", {}, el("span", { class: `swatch ${kind}` }), `${name} `, this.values[i]),
    );
    this.when = el("li");
    this.entries = entries;
    this.drawing = svg("svg", { role: "img", tabindex: "0" });
    this.title = title;
    parent.append(
      el(
        "section",
        { class: "chart", "aria-label": title },
        el(
          "div",
          { class: "head" },
          el("h2", {}, title),
          el("p", { class: "soft" }, unit),
          el("ul", { class: "legend" }, this.when, ...entries),
        ),
        this.drawing,
      ),
    );
    this.at = null; // the moment that is pointed at, as seconds before now
    this.points = series.map(() => []);
    this.now = 0;
    new ResizeObserver(() => this.draw()).observe(this.drawing);
    this.drawing.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.drawing.addEventListener("pointerleave", () => this.point(null));
    this.drawing.addEventListener("blur", () => this.point(null));
    this.drawing.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: 1, ArrowRight: -1 }[event.key];
      if (!by) return;
      event.preventDefault();
      this.at = Math.max(0, (this.at ?? 0) + (by * this.window_s) / 60);
      this.draw();
    });
  }

  /** `points`: of each series [Unix time, value or null], in order of time. */
  show(points, now) {
    this.points = points;
    this.now = now;
    const first = Math.min(now, ...points.flatMap((of) => of.slice(0, 1).map(([t]) => t)));
    this.window_s = WINDOWS_S.find((s) => s >= now - first) ?? WINDOWS_S.at(-1);
    this.draw();
  }

  point(x) {
    const width = this.drawing.clientWidth - LEFT - RIGHT;
    this.at = x === null ? null : Math.max(0, Math.min(1, 1 - (x - LEFT) / width)) * this.window_s;
    this.draw();
  }

  draw() {
    const width = this.drawing.clientWidth;
    if (!width || !this.window_s) return;
    this.drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const start = this.now - this.window_s;
    const shown = this.points.map((of) => of.filter(([t]) => t >= start));
    const values = shown.flat().map(([, value]) => value);
    const highest = Math.max(0, ...values.map((value) => value ?? 0));
    const most = Math.max(this.least, seen(values));
    const step = tick(most),
      end = step * Math.max(1, Math.ceil(most / step - 1e-9));
    const x = (t) => LEFT + ((t - start) / this.window_s) * (width - LEFT - RIGHT);
    const y = (value) => TOP + (1 - Math.min(1, value / end)) * (HEIGHT - TOP - BOTTOM);
    const made = [];
    for (let value = 0; value <= end + step / 2; value += step) {
      made.push(
        svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
        svg("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, axis(value)),
      );
    }
    for (const [share, anchor] of [
      [0, "start"],
      [0.5, "middle"],
      [1, "end"],
    ]) {
      const words = share === 1 ? "now" : ago((1 - share) * this.window_s);
      made.push(
        svg("text", { x: x(start + share * this.window_s), y: HEIGHT - 4, "text-anchor": anchor }, words),
      );
    }
    shown.forEach((of, i) => {
      for (const piece of pieces(of)) {
        const line = piece.map(([t, value]) => `${x(t).toFixed(1)},${y(value).toFixed(1)}`).join("L");
        if (i === 0) {
          const [first, last] = [piece[0][0], piece.at(-1)[0]].map((t) => x(t).toFixed(1));
          made.push(
            svg("path", {
              class: `${this.series[i].kind} area`,
              d: `M${line}L${last},${y(0)}L${first},${y(0)}Z`,
            }),
          );
        }
        made.push(svg("path", { class: this.series[i].kind, fill: "none", d: `M${line}` }));
      }
    });
    if (!shown.flat().some(([, value]) => value !== null)) {
      made.push(
        svg(
          "text",
          { class: "none", x: (LEFT + width - RIGHT) / 2, y: HEIGHT / 2, "text-anchor": "middle" },
          "nothing yet",
        ),
      );
    }
    if (highest > end)
      made.push(svg("text", { x: LEFT + 6, y: TOP + 11 }, `▲ cut off: up to ${this.words(highest)}`));
    if (this.at !== null) {
      const at = x(this.now - this.at);
      made.push(svg("line", { class: "cross", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }));
    }
    this.drawing.replaceChildren(...made);
    this.say(shown);
  }

  /** The values of the moment that is pointed at, or the latest. */
  say(shown) {
    const moment = this.now - (this.at ?? 0);
    this.when.textContent = this.at === null ? "" : clock(moment);
    const said = shown.map((of, i) => {
      const near = of
        .filter(([t, value]) => value !== null && Math.abs(t - moment) < BREAK_S)
        .sort(([a], [b]) => Math.abs(a - moment) - Math.abs(b - moment))[0];
      this.values[i].textContent = near ? this.words(near[1]) : "–";
      this.entries[i].hidden = this.series[i].optional && !this.points[i].some(([, value]) => value !== null);
      return `${this.series[i].name} ${near ? this.words(near[1]) : "none"}`;
    });
    this.drawing.setAttribute("aria-label", `${this.title}, ${this.unit}: ${said.join(", ")}`);
  }
}

/** Points without gaps, several of them or one drawn as a dash. */
function pieces(points) {
  const found = [[]];
  let before = null;
  for (const [t, value] of points) {
    if (value === null || (before !== null && t - before > BREAK_S)) found.push([]);
    if (value !== null) {
      found.at(-1).push([t, value]);
      before = t;
    }
  }
  return found.filter((piece) => piece.length > 1);
}

function axis(value) {
  if (value >= 1e6) return `${few(value / 1e6)} M`;
  return value >= 1e4 ? `${+(value / 1e3).toFixed(1)} k` : (+value.toFixed(4)).toLocaleString("en");
}

const ago = (seconds) => (seconds >= 120 ? `${+(seconds / 60).toFixed(1)} min ago` : `${seconds} s ago`);
